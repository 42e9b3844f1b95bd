"""TensorBoard, Weights & Biases, MLflow and Trackio: what each library itself reads back of a run.

Each run is cut off after a checkpoint and resumed, so it makes some steps twice. No network is used.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.run import resume, train
from test_resume import Crashing
from tiny_run import run_data

pytestmark = pytest.mark.peers


def crashed_and_resumed(
    base: Path, folder: Path, tracker: str
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Run with a tracker; what `metrics.jsonl` holds for it, by adapter and key: (step, value)."""
    data = run_data(base, folder, report_to=tracker, run_name="ranks", project="tiny")
    data["defaults"]["logging_steps"] = 1
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(data, folder=folder), reporter=Crashing(after=11))
    time.sleep(1 - time.time() % 1)  # wandb names a folder by the second in which it begins
    assert resume(folder / "run").status == "finished"
    found: dict[str, dict[str, list[tuple[int, float]]]] = {"first": {}, "second": {}}
    for line in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()):
        for key in ("loss", "learning_rate", "grad_norm", "eval_loss"):
            if key in line:
                found[line["adapter"]].setdefault(key, []).append((line["step"], line[key]))
    assert len(found["second"]["loss"]) == 9
    assert len(found["first"]["eval_loss"]) == 3
    return found


def prefixed(key: str) -> str:
    """A key as Transformers' callbacks write it."""
    return f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"


def test_tensorboard(tiny_base: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = crashed_and_resumed(tiny_base, tmp_path, "tensorboard")
    for adapter, values in expected.items():
        folder = tmp_path / "run" / "logs" / adapter
        assert len(list(folder.iterdir())) == 2  # a file for each part of the run
        read = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
        for key, points in values.items():
            found = [(one.step, one.value) for one in read.Scalars(prefixed(key))]
            assert [step for step, _ in found] == [step for step, _ in points]
            assert [v for _, v in found] == pytest.approx([v for _, v in points], rel=1e-6)  # fp32
        text = read.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()
        assert json.loads(text.strip("`\n"))["name"] == adapter


def test_a_new_tensorboard_run_hides_an_old_one(tiny_base: Path, tmp_path: Path) -> None:
    """In a folder outside of the run's, files of an earlier run stay."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = run_data(tiny_base, tmp_path, report_to="tensorboard", logging_dir="boards")
    for steps in (8, 4):
        data["adapters"][1]["max_steps"] = steps
        train(resolve_config(data, folder=tmp_path), overwrite=True)
    read = EventAccumulator(str(tmp_path / "boards" / "second")).Reload()
    assert [one.step for one in read.Scalars("train/loss")] == [2, 4]


@pytest.fixture
def wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where wandb writes its files."""
    import wandb

    wandb.teardown()  # it reads its settings once
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield tmp_path / "wandb"
    wandb.teardown()


def records_of(path: Path) -> Iterator[Any]:
    """The records of a run's file: a log of blocks of 32 KiB, as LevelDB's, with wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""  # after the file's own header
    while len(data) - at >= 7:
        if 32768 - at % 32768 < 7:  # the rest of a block is empty
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a message, or its last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_wandb(tiny_base: Path, tmp_path: Path, wandb_offline: Path) -> None:
    import wandb

    expected = crashed_and_resumed(tiny_base, tmp_path, "wandb")
    wandb.teardown()  # ends its process, which writes the files
    kept = map(json.loads, (tmp_path / "run" / "tracking.jsonl").read_text().splitlines())
    ids = {line["adapter"]: line["id"] for line in kept if "id" in line}
    assert len(set(ids.values())) == 2
    for adapter, values in expected.items():
        found: dict[str, list[tuple[int, float]]] = {}
        files = sorted(wandb_offline.glob(f"offline-run-*-{ids[adapter]}/*.wandb"))
        assert len(files) == 2
        for path in files:
            records = list(records_of(path))
            (run,) = (one.run for one in records if one.HasField("run"))
            assert (run.run_id, run.run_group, run.project) == (ids[adapter], "ranks", "tiny")
            assert run.display_name == adapter
            config = {one.key: json.loads(one.value_json) for one in run.config.update}
            assert config["name"] == adapter
            for one in records:
                if one.HasField("history"):
                    row = {
                        item.nested_key[0] if item.nested_key else item.key: item for item in one.history.item
                    }
                    row = {key: json.loads(item.value_json) for key, item in row.items()}
                    step = row.pop("train/global_step")
                    for key, value in row.items():
                        found.setdefault(key, []).append((step, value))
        for key, points in values.items():
            assert found[prefixed(key)] == points


def test_wandb_without_a_login_is_refused(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    wandb.teardown()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(
        RunError, match=r"report_to: wandb: .*; put that right, or go without by --set report_to"
    ):
        train(resolve_config(run_data(tiny_base, tmp_path, report_to="wandb"), folder=tmp_path))
    wandb.teardown()


def test_mlflow(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In folders, which need no database to be set up."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    expected = crashed_and_resumed(tiny_base, tmp_path, "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("tiny")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["first", "ranks", "second"]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    for adapter, values in expected.items():
        run = runs[adapter]
        assert run.data.tags["mlflow.parentRunId"] == runs["ranks"].info.run_id
        assert run.data.params["name"] == adapter
        assert run.data.params["lora.r"] == {"first": "4", "second": "7"}[adapter]
        for key, points in values.items():
            history = client.get_metric_history(run.info.run_id, key)
            assert [(one.step, one.value) for one in history] == points


def test_an_mlflow_server_that_is_away_is_refused(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: MLflow's own calls try again for minutes."""
    monkeypatch.setattr("mlora.run.trackers.mlflow._PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        for port in (9, silent.getsockname()[1]):  # the discard port, which nobody serves
            monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
            with pytest.raises(RunError, match=r"report_to: mlflow: .*127\.0\.0\.1.*; put that right"):
                train(resolve_config(run_data(tiny_base, tmp_path, report_to="mlflow"), folder=tmp_path))


def test_trackio(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder when it is imported
    monkeypatch.delitem(sys.modules, "mlora.run.trackers.trackio", raising=False)
    expected = crashed_and_resumed(tiny_base, tmp_path, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert sorted(SQLiteStorage.get_runs("tiny")) == ["ranks/first", "ranks/second"]
    for adapter, values in expected.items():
        config = SQLiteStorage.get_run_config("tiny", f"ranks/{adapter}")
        assert (config["name"], config["_Group"]) == (adapter, "ranks")
        rows = SQLiteStorage.get_logs("tiny", f"ranks/{adapter}")
        for key, points in values.items():
            found = [(row["step"], row[prefixed(key)]) for row in rows if prefixed(key) in row]
            assert sorted(found) == points


def test_trackio_goes_on_with_no_other_run_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder when it is imported
    monkeypatch.delitem(sys.modules, "mlora.run.trackers.trackio", raising=False)
    from mlora.run.trackers.tracker import TrackedGroup
    from mlora.run.trackers.trackio import TrackioTracker
    from trackio.sqlite_storage import SQLiteStorage

    ids: list[str] = []
    for known, step in ((None, 1), (None, 1), (0, 2)):
        tracker = TrackioTracker(TrackedGroup("ranks", "tiny", tmp_path))
        ids.append(tracker.begin("a", None if known is None else ids[known], {"name": "a"}))
        tracker.log("a", {"loss": 1.0}, step)
        tracker.end("a", "finished")
        time.sleep(1.1)  # by which Trackio tells which run is the newest
    rows = [SQLiteStorage.get_logs("tiny", "ranks/a", run_id=one) for one in ids]
    assert [[row["step"] for row in each] for each in rows] == [[1], [1], [2]]
