"""Replicas: several pipelines that train adapters of their own, led from one process."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from mlora.config.config_file import load_config
from mlora.errors import RunError
from mlora.pipeline import Hooks, Neighbours, StageProcess
from mlora.pipeline.across import Neighbour
from mlora.pipeline.port import LocalPort
from mlora.pipeline.wire import Wire
from mlora.run.run import resume, train
from safetensors.torch import load_file
from stage_runs import run_stages
from tiny_run import lines, run_data, write_run


def data(base: Path, folder: Path) -> dict[str, Any]:
    found = run_data(base, folder)
    third = {**found["adapters"][1], "name": "third", "max_steps": 4, "per_device_train_batch_size": 2}
    return {**found, "adapters": [*found["adapters"], third]}


def assert_same_run(folder: Path, expected: Path) -> None:
    """The same lines, in the order of each adapter, and the same folders."""
    found, wanted = ({} for _ in range(2))
    for run, by_name in ((folder, found), (expected, wanted)):
        for line in lines(run):
            by_name.setdefault(line["adapter"], []).append(line)
    assert found.keys() == wanted.keys()
    for name, records in wanted.items():
        assert len(found[name]) == len(records)
        for ours, theirs in zip(found[name], records, strict=True):
            names = [key for key, value in theirs.items() if isinstance(value, str)]
            assert {key: ours.pop(key) for key in names} == {key: theirs.pop(key) for key in names}
            assert ours == pytest.approx(theirs, rel=1e-5)
        ours, theirs = (
            load_file(run / "adapters" / name / "adapter_model.safetensors") for run in (folder, expected)
        )
        assert list(ours) == list(theirs)
        for key in theirs:
            assert ours[key].sub(theirs[key]).abs().max() <= 1e-5
        configs = [
            (run / "adapters" / name / "adapter_config.json").read_text() for run in (folder, expected)
        ]
        assert configs[0] == configs[1]


@pytest.fixture(scope="module")
def alone(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one device."""
    folder = tmp_path_factory.mktemp("alone")
    train(load_config(write_run(folder, data(tiny_base, folder))))
    return folder / "run"


def test_two_pipelines_train_as_one_device_and_go_on_on_one(
    tiny_base: Path, alone: Path, tmp_path: Path
) -> None:
    path = write_run(tmp_path, data(tiny_base, tmp_path))
    command = ["train", path, "--trace", "--set", "pipeline={stages: 2, replicas: 2}"]
    codes, _, errors = run_stages(command, 4)
    assert codes == [0] * 4, errors
    run = tmp_path / "run"
    assert_same_run(run, alone)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["pipeline"]["stages"], config["pipeline"]["replicas"]) == (2, 2)
    # as if it had been killed: the last checkpoint is before the end of some adapters
    (run / "summary.json").unlink()
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "pipeline": {"stages": 1}}))
    assert resume(run).status == "finished"
    assert_same_run(run, alone)


def test_replicas_of_one_stage(tiny_base: Path, alone: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, data(tiny_base, tmp_path))
    codes, _, errors = run_stages(["train", path, "--set", "pipeline.replicas=2"], 2)
    assert codes == [0, 0], errors
    assert_same_run(tmp_path / "run", alone)


def test_replicas_need_processes(tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, data(tiny_base, tmp_path))
    with pytest.raises(RunError, match=r"pipeline.replicas: 2 need processes of their own"):
        train(load_config(path, ["pipeline.replicas=2"]))
    assert not (tmp_path / "run").exists()


def test_results_give_credit_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than its credit comes back from another pipeline, as with a few checkpoints."""
    monkeypatch.setattr("mlora.pipeline.across.WirePort", lambda wire, device, nccl: wire)
    there, back = (cast(Wire, LocalPort(torch.device("cpu"))) for _ in range(2))
    links = [Neighbours(replicas=(Neighbour(1, there, back),)), Neighbours(Neighbour(0, back, there))]
    first, other = (
        StageProcess(
            torch.nn.Linear(1, 1), 0, 1, link, "lorapp", mean_square, hooks=Answering(), credit_bytes=1000
        )
        for link in links
    )
    thread = threading.Thread(target=other.serve, daemon=True)
    thread.start()

    def ask() -> None:
        for _ in range(5):
            first.control("state", replica=1)
        first.close()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    for waited in (asking, thread):
        waited.join(20)
        assert not waited.is_alive()


class Answering(Hooks):
    """Answers with 400 bytes."""

    def control(self, verb: str, arguments: Any) -> torch.Tensor:
        return torch.zeros(100)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, None]:
    return (output - target).square().mean(), None
