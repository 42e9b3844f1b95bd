"""Runs over GPTQ and AWQ checkpoints: stages, resume, generation, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlora
import pytest
from command_line import Run
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.model import quantization
from mlora.run.validation import validate

pytest.importorskip("gptqmodel", reason="`make gptq` makes an environment with gptqmodel")

from tests.mlora.seam_runs import train_and_resume
from tests.mlora.tiny_run import losses, run_data, save_base, write_run
from tests.packed_checkpoints import save_packed

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = save_base(tmp_path_factory.mktemp("wide"), hidden=64, intermediate_size=128)
    return {
        method: save_packed(base, tmp_path_factory.mktemp(method), method, act_order=method == "gptq")
        for method in ("gptq", "awq")
    }


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_run_resumes_with_the_same_bits_and_two_stages_are_one(
    bases: dict[str, Path], tmp_path: Path, method: str
) -> None:
    found = []
    for stages in (1, 2):
        folder = tmp_path / str(stages)
        folder.mkdir()
        run = train_and_resume(run_data(bases[method], folder, pipeline={"stages": stages}), folder)
        found.append([loss for name in ("first", "second") for loss in losses(run, name)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_validate_checkpointing_and_generate(run: Run, bases: dict[str, Path], tmp_path: Path) -> None:
    data = run_data(bases["gptq"], tmp_path, gradient_checkpointing=True)
    data["defaults"]["max_steps"] = 2
    del data["adapters"][1], data["adapters"][0]["eval_dataset"], data["adapters"][0]["eval_steps"]
    data["adapters"][0]["lora"] = {"r": 4, "target_modules": "all-linear"}
    path = write_run(tmp_path, data)
    told = run("validate", path).stdout
    said = r"^base model: quantized, as its files say \(gptq\): \d+ KiB$"
    assert re.search(said, told, re.MULTILINE), told
    assert run("train", path).exit_code == 0
    done = run("generate", tmp_path / "run", "-p", "7", "--max-new-tokens", "2")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("[first] 7")


def changed(base: Path, folder: Path, **said: Any) -> Path:
    """A checkpoint whose config says something else."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= said
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("method", "said", "message"),
    [
        ("gptq", {"bits": 3}, "is quantized (gptq) with bits 3; served is 2 or 4 or 8; use the original mod"),
        ("gptq", {"checkpoint_format": "marlin"}, "with format marlin; served is gptq or gptq_v2; use the"),
        (
            "awq",
            {"version": "gemv"},
            "is quantized (awq) with format gemv; served is gemm; use the",
        ),
        ("gptq", {"dynamic": {"-:.*": {}}}, "with dynamic {'-:.*': {}}; served is without it; use the origi"),
        ("gptq", {"bits": 8}, "cannot load "),
    ],
)
def test_what_is_refused(
    bases: dict[str, Path], tmp_path: Path, method: str, said: dict[str, Any], message: str
) -> None:
    """The last one has weights that do not fit their config."""
    wrong = changed(bases[method], tmp_path / "wrong", **said)
    with pytest.raises(RunError, match=r"^base_model: ") as caught:
        validate(resolve_config(run_data(wrong, tmp_path), folder=tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pack_base": True}, "pack_base: needs plain weights, but the base model is quantized; remove it"),
        ({"offload": {"base": "disk"}}, "offload: does not serve a quantized base model yet"),
        (
            {"quantization": {"method": "bnb-nf4"}},
            "is quantized already (gptq); remove quantization, or ",
        ),
    ],
)
def test_what_such_a_base_does_not_serve(
    bases: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError) as caught:
        validate(resolve_config(run_data(bases["gptq"], tmp_path) | changes, folder=tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["gptqmodel", "optimum"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_missing_package_is_one_line(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, stages: int
) -> None:
    there = quantization.find_spec
    monkeypatch.setattr(quantization, "find_spec", lambda name: None if name == missing else there(name))
    data = run_data(bases["gptq"], tmp_path, pipeline={"stages": stages})
    install = {"gptqmodel": "--no-deps gptqmodel ", "optimum": "optimum$"}[missing]
    said = f"^base_model: its weights need the package {missing}, .*: pip install {install}"
    with pytest.raises(RunError, match=said) as caught:
        mlora.train(resolve_config(data, folder=tmp_path))
    assert "\n" not in str(caught.value)
