"""`mlora train` over several stages gives the metrics and adapters of one stage."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlora.config.config_file import resolve_config
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.run.run import train
from mlora.run.validation import validate
from mlora.tasks.result import RunResult
from stage_runs import (
    COMMAND,
    ENVIRONMENT,
    LASTING,
    assert_alike,
    by_adapter,
    many_kinds,
    run_stages,
    save_deep_base,
    tensors,
)
from tiny_run import write_run

from tests.mlora.stages import program


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deep_base(tmp_path_factory.mktemp("base"))


def train_here(base: Path, folder: Path, pipeline: dict[str, Any], **changes: Any) -> RunResult:
    """Train over threads of this process; the run's folder is `folder/run`."""
    data = many_kinds(base, folder, pipeline=pipeline, **changes)
    return train(resolve_config(data, folder=folder))


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one stage."""
    folder = tmp_path_factory.mktemp("alone")
    result = train_here(base, folder, {})
    states = {name: adapter.state for name, adapter in result.adapters.items()}
    assert states == dict.fromkeys(LASTING, "finished") | {"refused": "refused", "explodes": "stopped"}
    assert result.adapters["deep"].message.startswith("stopped early")
    assert result.adapters["deep"].step == 4
    assert (
        result.adapters["explodes"].message == "the loss of step 2 is not a number; try a lower learning_rate"
    )
    found = by_adapter(folder / "run")
    assert [record["step"] for record in found["wide"] if "eval_loss" in record] == [0, 3, 6]
    assert "eval_exact_match" in found["head"][-1]
    assert max(record["grad_norm"] for record in found["queries"]) > 0.3  # it is clipped
    return folder / "run"


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param({"stages": 2}, marks=pytest.mark.nightly),  # also a process each, below
        pytest.param(
            {"stages": 3}, marks=pytest.mark.nightly
        ),  # also checkpointed, and a process each, below
        {"stages": 4},
        {"stages": 2, "partition": [1, 3], "micro_batches": 3},
        {"stages": 2, "schedule": "gpipe", "micro_batches": 2},
        {"stages": 3, "schedule": "1f1b", "micro_batches": 3},
    ],
    ids=str,
)
def test_stages_train_as_one(base: Path, alone: Path, tmp_path: Path, pipeline: dict[str, Any]) -> None:
    result = train_here(base, tmp_path, pipeline)
    assert result.exit_code == 1
    assert_alike(tmp_path / "run", alone)
    written = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["pipeline"]
    assert sum(written["partition"]) == 4
    assert len(written["partition"]) == pipeline["stages"]


def test_checkpointed_activations(base: Path, alone: Path, tmp_path: Path) -> None:
    train_here(base, tmp_path, {"stages": 3}, gradient_checkpointing=True)
    assert_alike(tmp_path / "run", alone)


def test_bf16_of_the_same_batches_is_the_same(base: Path, tmp_path: Path) -> None:
    """With all adapters in one batch, stages multiply what one stage does; only sums of squares differ."""
    found = []
    for name, pipeline in (("one", {}), ("two", {"stages": 2, "schedule": "gpipe"})):
        (tmp_path / name).mkdir()
        data = many_kinds(base, tmp_path / name, pipeline=pipeline, bf16=True)
        data["adapters"] = [adapter | {"max_grad_norm": 0, "max_steps": 4} for adapter in data["adapters"]]
        train(resolve_config(data, folder=tmp_path / name))
        metrics = by_adapter(tmp_path / name / "run")
        norms = [record.pop("grad_norm", 0.0) for records in metrics.values() for record in records]
        found.append((metrics, norms, tensors(tmp_path / name / "run")))
    (metrics, norms, weights), (others, other_norms, other_weights) = found
    assert metrics == others
    assert norms == pytest.approx(other_norms, rel=1e-6)
    for name in LASTING:
        assert all(torch.equal(weights[name][key], tensor) for key, tensor in other_weights[name].items())


def stage_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "stage" in thread.name]


def test_threads_end_with_a_run_that_does_not_begin(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = many_kinds(base, tmp_path, pipeline={"stages": 2})
    data["adapters"] = data["adapters"][1:2]
    data["adapters"][0]["lora"] = {"target_modules": ["nothing"]}
    with pytest.raises(RunError, match="every adapter was refused"):
        train(resolve_config(data, folder=tmp_path))
    data["adapters"][0]["lora"] = {"target_modules": ["q_proj"]}
    validate(resolve_config(data, folder=tmp_path))
    assert not stage_threads()
    monkeypatch.setattr(Engine, "base_gemm", property(fset=not_served))
    with pytest.raises(RunError, match="base_gemm: not here"):
        train(resolve_config({**data, "base_gemm": "onednn"}, folder=tmp_path))
    assert not stage_threads()


def not_served(engine: Engine, library: str) -> None:
    raise ValueError("base_gemm: not here")


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)]
)
def test_processes(base: Path, alone: Path, tmp_path: Path, count: int) -> None:
    path = write_run(tmp_path, many_kinds(base, tmp_path))
    codes, outputs, errors = run_stages(["train", path, "--set", f"pipeline.stages={count}"], count)
    assert codes == [1] + [0] * (count - 1)
    assert "explodes: stopped at step 1: the loss of step 2 is not a number" in errors[0]
    assert errors[0].startswith("error: refused: refused: ")
    assert outputs[1:] == errors[1:] == [""] * (count - 1)
    assert_alike(tmp_path / "run", alone)


def test_command_line(base: Path, alone: Path, tmp_path: Path) -> None:
    """With its own launcher."""
    path = write_run(tmp_path, many_kinds(base, tmp_path))
    body = COMMAND.format(before="import sys", arguments=["train", str(path), "--stages", "2"])
    with program(body, ENVIRONMENT) as running:
        code, _, errors = running.end(120)
    assert code == 1
    assert len(errors.splitlines()) == 2, errors
    assert_alike(tmp_path / "run", alone)


@pytest.mark.nightly
def test_torchrun(base: Path, alone: Path, tmp_path: Path) -> None:
    data = many_kinds(base, tmp_path, pipeline={"stages": 2})
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mlora"]
    data["adapters"] = data["adapters"][:4]
    command = [sys.executable, "-m", *torchrun, "train", str(write_run(tmp_path, data))]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, expected = tensors(tmp_path / "run"), tensors(alone)
    assert found.keys() == expected.keys()
    assert by_adapter(tmp_path / "run").keys() == set(LASTING)
