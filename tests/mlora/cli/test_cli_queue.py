"""`mlora submit`, `cancel`, `pause`, `unpause`, and what `mlora status` shows of them."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run, only_line
from mlora.cli.run_status import read_status
from mlora.store.queue import TaskQueue
from mlora.store.requests import submit
from mlora.store.run_folder import Metrics
from queue_runs import THIRD, states, write_task
from tiny_run import lines, random_tokens, run_data, write_jsonl, write_run


@pytest.fixture
def done(trained: Path, tmp_path: Path) -> Path:
    """The folder of a finished run that may be changed."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    """A task that fits to the finished run."""
    return write_task(tmp_path)


def files_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The files below a folder, and when they were written."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


# after the end


def test_a_task_that_is_submitted_after_the_end_trains_alone(run: Run, done: Path, task_file: Path) -> None:
    adapters, before = files_of(done / "adapters"), lines(done)
    result = run("submit", done, task_file)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == [
        "third: submitted",
        f"the run is not active; `mlora resume {done}` applies this",
    ]
    shown = run("status", done).stdout.splitlines()
    assert shown[0] == f"finished: {done}; new requests wait; `mlora resume {done}` takes them"
    assert shown[-1].split() == ["third", "queued", "0/5"]
    result = run("resume", done)
    assert result.exit_code == 0, result.stderr
    assert states(done) == {"first": "finished", "second": "finished", "third": "finished"}
    now = files_of(done / "adapters")
    assert {name: now[name] for name in adapters} == adapters
    assert lines(done)[: len(before)] == before
    assert {record["adapter"] for record in lines(done)[len(before) :]} == {"third"}
    assert [record["step"] for record in lines(done)[len(before) :]] == [1, 2, 3, 4, 5]
    result = run("generate", done, "-p", "a", "--max-new-tokens", "1", "--device", "cpu")
    assert [line.split()[0] for line in result.stdout.splitlines() if line.startswith("[")] == [
        "[first]",
        "[second]",
        "[third]",
    ]


def test_a_run_whose_tasks_are_all_paused(run: Run, done: Path, task_file: Path) -> None:
    assert run("submit", done, task_file).exit_code == 0
    assert "third: will be paused" in run("pause", done, "third").stdout
    advice = f"`mlora unpause {done} third`, then `mlora resume {done}`"
    result = run("resume", done)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"only paused tasks remain; continue with {advice}"
    again = run("resume", done)
    assert again.exit_code == 0
    assert again.stdout.splitlines()[-1] == f"only paused tasks remain; continue with {advice}"
    assert "resuming" not in again.stdout
    assert run("status", done).stdout.splitlines()[0] == f"paused: {done}; continue with {advice}"
    already = run("pause", done, "third")
    assert (already.exit_code, already.stdout) == (0, "third: is already paused\n")
    assert "third: will continue" in run("unpause", done, "third").stdout
    assert run("status", done).stdout.splitlines()[0] == (
        f"paused: {done}; new requests wait; `mlora resume {done}` takes them"
    )
    assert run("resume", done).exit_code == 0
    assert states(done)["third"] == "finished"


def test_a_cancelled_task_is_neither_finished_nor_failed(run: Run, done: Path, task_file: Path) -> None:
    assert run("submit", done, task_file).exit_code == 0
    assert run("cancel", done, "third").exit_code == 0
    again = run("cancel", done, "third")
    assert (again.exit_code, again.stdout) == (0, "third: cancel was already requested\n")
    line = only_line(run("pause", done, "third"))
    assert line == "error: third: cannot be paused: cancel was already requested"
    result = run("resume", done)
    assert result.exit_code == 0
    assert (
        next(row for row in result.stdout.splitlines() if row.startswith("third  ")).split()[1] == "cancelled"
    )
    assert json.loads((done / "summary.json").read_text())["status"] == "finished"
    assert not (done / "adapters" / "third").exists()
    assert run("cancel", done, "third").stdout == "third: is already cancelled\n"


def test_several_names_and_files_are_taken_together_or_not_at_all(
    run: Run, done: Path, tmp_path: Path
) -> None:
    files = [write_task(tmp_path, name=name) for name in ("third", "fourth")]
    bad = write_task(tmp_path, name="fifth", learning_rat=1)
    assert "learning_rat: unknown key" in only_line(run("submit", done, *files, bad))
    assert f"{files[0]}: is given twice" in only_line(run("submit", done, files[0], files[0]))
    (tmp_path / "copy.yaml").write_text(files[0].read_text().replace("third", "Third"))
    assert f"name: {files[0]} uses the same name" in only_line(
        run("submit", done, files[0], tmp_path / "copy.yaml")
    )
    assert list(states(done)) == ["first", "second"]
    assert run("submit", done, *files).exit_code == 0
    assert "is already finished" in only_line(run("pause", done, "third", "first"))
    assert read_status(done).tasks["third"].asked == []
    result = run("pause", done, "third", "fourth", "third")
    assert result.stdout.splitlines()[:2] == ["third: will be paused", "fourth: will be paused"]
    assert read_status(done).tasks["third"].asked == ["pause"]
    assert run("unpause", done, "third").exit_code == 0
    assert run("unpause", done, "third").stdout == "third: is not paused\n"
    assert read_status(done).tasks["third"].asked == ["pause", "unpause"]


def test_a_task_brings_its_own_data(run: Run, done: Path, tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    write_jsonl(below / "three.jsonl", random_tokens(4, 3))
    own = [{"name": "three", "path": "three.jsonl", "format": "tokens"}]
    path = write_task(below, dataset="three", eval_dataset="two", datasets=own, max_steps=1)
    assert run("submit", done, path).exit_code == 0
    with TaskQueue(done / "queue.sqlite") as queue:
        (request,) = queue.requests()
    assert request.content["adapter"]["learning_rate"] == 5e-3  # of the run's defaults
    assert [d["path"] for d in request.content["datasets"]][1:] == [str(below / "three.jsonl")]
    assert run("resume", done).exit_code == 0
    assert states(done)["third"] == "finished"


# errors


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "first"}, "name: the run already has a task 'first'; choose another name"),
        (
            {"name": "FIRST"},
            "name: the run already has a task 'first', which differs from 'FIRST' only in case; choose",
        ),
        ({"name": "a b"}, "name: 'a b' is not a plain name"),
        ({"name": None}, "name: is missing"),
        ({"name": ["a"]}, "name: must be text, got ['a']"),
        ({"dataset": "on"}, "dataset: no dataset is named 'on'; did you mean 'one'?"),
        ({"learning_rat": 1}, "learning_rat: unknown key; did you mean 'learning_rate'?"),
        ({"lora": {"rr": 1}}, "lora.rr: unknown key; did you mean 'r'?"),
        ({"lora": {"r": 0}}, "lora.r: must be at least 1, got 0"),
        ({"lora": None}, "needs lora (PEFT's LoraConfig fields) or init_from (a PEFT folder)"),
        ({"lora": None, "init_from": "nowhere"}, "nowhere has no adapter_config.json"),
        ({"datasets": 3}, "datasets: must be a list, got 3"),
        (
            {"datasets": [{"name": "one"}]},
            "datasets: the run already has a dataset 'one'; remove or rename this one",
        ),
        (
            {"datasets": [{"name": "x", "path": "x", "format": "csv"}]},
            "datasets.x.format: must be one of tokens, ",
        ),
        (
            {"datasets": [{"name": "x", "path": "x.jsonl", "format": "text"}], "dataset": "x"},
            "dataset 'x': ",
        ),
        ({"adapters": []}, "adapters: a task file describes one adapter; move its keys"),
    ],
)
def test_a_task_that_is_wrong(
    run: Run, done: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    path = write_task(tmp_path, **changes) if isinstance(changes.get("name", ""), str) else None
    if path is None:
        path = tmp_path / "third.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in (THIRD | changes).items() if v is not None}))
    line = only_line(run("submit", done, path))
    assert line.startswith(f"error: {path}: ")
    assert expected in line
    assert not read_status(done).news


def test_files_that_are_no_tasks(run: Run, done: Path, tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- name: third\n")
    assert "must hold keys such as name, dataset and lora, got a list" in only_line(
        run("submit", done, tmp_path / "list.yaml")
    )
    assert "cannot be read: No such file" in only_line(run("submit", done, tmp_path / "nothing.yaml"))
    assert "holds a" not in only_line(run("submit", tmp_path, tmp_path / "list.yaml"))


@pytest.mark.parametrize("kind", ["submit", "cancel", "pause", "unpause"])
def test_no_run_there(run: Run, tmp_path: Path, kind: str) -> None:
    line = only_line(run(kind, tmp_path, "third"))
    assert line.startswith(
        f"error: {tmp_path}: is not a run folder: it has no config.yaml; if the run has just started"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_has_just_taken_its_folder(
    run: Run, done: Path, task_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config comes a moment later."""
    config = (done / "config.yaml").rename(done / "later.yaml")
    with Metrics(done / "metrics.jsonl"):
        with monkeypatch.context() as patch:
            patch.setattr("mlora.store.requests.PATIENCE", 0.1)
            assert "has no config.yaml" in only_line(run("submit", done, task_file))
        writing = threading.Timer(0.3, lambda: config.rename(done / "config.yaml"))
        writing.start()
        result = run("submit", done, task_file)
        writing.join()
    assert result.stdout.splitlines() == [
        "third: submitted",
        "the run is active and applies this at its next iteration",
    ]


@pytest.mark.parametrize(
    ("kind", "verb"), [("cancel", "be cancelled"), ("pause", "be paused"), ("unpause", "continue")]
)
def test_tasks_that_are_not_there_or_have_ended(run: Run, done: Path, kind: str, verb: str) -> None:
    assert only_line(run(kind, done, "frist")) == (
        "error: frist: the run has no such task; did you mean 'first'?"
    )
    line = only_line(run(kind, done, "zzz"))
    assert line == "error: zzz: the run has no such task; its tasks: first, second"
    assert only_line(run(kind, done, "first")).startswith(
        f"error: first: cannot {verb}: it is already finished"
    )
    assert not read_status(done).news


def test_a_name_that_was_refused_stays_taken(run: Run, done: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "bad.jsonl", [{"input_ids": [99999]}])
    own = [{"name": "bad", "path": "bad.jsonl", "format": "tokens"}]
    path = write_task(tmp_path, dataset="bad", datasets=own)
    assert run("submit", done, path).exit_code == 0
    result = run("resume", done)
    assert result.exit_code == 1
    assert "third: refused: " in result.stderr
    shown = run("status", done).stdout
    assert shown.startswith(f"failed: {done}\n")
    assert shown.splitlines()[-1].startswith("third: refused: ")
    assert "already has a task 'third'" in only_line(run("submit", done, path))
    assert "it is already refused" in only_line(run("cancel", done, "third"))


def test_a_queue_that_cannot_be_used(run: Run, done: Path, task_file: Path) -> None:
    (done / "queue.sqlite").write_bytes(b"something else")
    for command in (
        ("submit", done, task_file),
        ("pause", done, "first"),
        ("status", done),
        ("resume", done),
    ):
        assert "queue.sqlite: cannot be used: file is not a database" in only_line(run(*command))


# status


def test_status_of_a_run_without_a_queue(run: Run, done: Path) -> None:
    (done / "queue.sqlite").unlink()
    assert run("status", done).stdout.startswith(f"finished: {done}\n")
    assert not (done / "queue.sqlite").exists()


def test_status_shows_who_waits_and_memory(run: Run, done: Path, task_file: Path) -> None:
    summary = json.loads((done / "summary.json").read_text())
    summary["status"] = "running"
    summary["adapters"]["first"]["state"] = summary["adapters"]["second"]["state"] = "running"
    (done / "summary.json").write_text(json.dumps(summary))
    size = 2**20
    memory = {
        f"{key}_bytes": n * size
        for n, key in enumerate(("limit", "base", "reserved", "predicted", "peak"), 1)
    }
    with TaskQueue(done / "queue.sqlite") as queue:
        views = {
            "first": {"state": "running", "states_bytes": 3 * size, "batch_bytes": size // 2},
            "second": {"state": "waiting", "states_bytes": size, "batch_bytes": size},
        }
        queue.show(views, {"memory": memory})
    with Metrics(done / "metrics.jsonl"):
        assert (
            "the run is active and applies this at its next iteration"
            in run("submit", done, task_file).stdout
        )
        run("pause", done, "first")
        shown = run("status", done).stdout.splitlines()
        found = json.loads(run("status", done, "--json").stdout)
    assert shown[0] == f"running: {done}"
    rows = [row.split() for row in shown[2:5]]
    assert [row[:2] for row in rows] == [["first", "running"], ["second", "waiting"], ["third", "queued"]]
    assert "pause" in rows[0]
    assert rows[0][-4:] == ["3.0", "MiB", "0.5", "MiB"]
    assert shown[5] == "memory: limit 1 MiB, base 2 MiB, reserve 3 MiB, predicted 4 MiB, measured peak 5 MiB"
    assert (found["status"], found["at_work"], found["news"]) == ("running", True, True)
    assert found["memory"] == memory
    tasks = {task["name"]: task for task in found["tasks"]}
    assert tasks["first"]["asked"] == ["pause"]
    assert tasks["second"]["state"] == "waiting"
    assert tasks["second"]["predicted"] == {"states_bytes": size, "batch_bytes": size}
    assert tasks["third"]["max_steps"] == 5
    dead = run("status", done).stdout.splitlines()
    assert dead[0].startswith(f"not running; `mlora resume {done}` continues from its last checkpoint")
    assert [row.split()[1] for row in dead[2:5]] == ["unfinished", "unfinished", "queued"]


def test_a_request_that_comes_too_late_is_told_of(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    task = write_task(tmp_path)
    write_summary = "mlora.store.run_folder.RunFolder.write_summary"

    def late(folder: Any, summary: dict[str, Any]) -> None:
        original(folder, summary)
        if summary["status"] == "finished":
            submit(folder.path, [task])

    from mlora.store.run_folder import RunFolder

    original = RunFolder.write_summary
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_summary, late)
        result = run("train", path)
    assert result.exit_code == 0
    expected = f"new requests came meanwhile; take them with: mlora resume {tmp_path}/run"
    assert result.stdout.splitlines()[-1] == expected


def test_the_commands_start_fast(tmp_path: Path) -> None:
    program = (
        "import sys, mlora.store.requests, mlora.cli.run_status, mlora.cli.app; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ)
    assert found.stdout == "False\n", found.stderr
