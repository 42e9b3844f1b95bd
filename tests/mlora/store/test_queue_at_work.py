"""What runs at work do with their queue: requests are taken while they train, and again after a kill."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from limited_runs import Watching, five_tasks, interrupt
from mlora.cli.run_status import read_status
from mlora.config.config_file import resolve_config
from mlora.run.reporter import Reporter
from mlora.run.run import resume, train
from mlora.store.checkpoint import list_checkpoints
from mlora.store.queue import TaskQueue, _HeldQueue
from mlora.store.requests import change, submit
from mlora.store.run_folder import read_metrics
from queue_runs import THIRD, states, write_task
from tiny_run import lines, run_data, weights, write_run

PATIENCE = 120.0  # seconds until a run at work that does not come on has failed


class Asking(Reporter):
    """Calls functions once a task has made a number of steps, as another process would do then."""

    def __init__(self, **calls: tuple[int, Callable[[], object]]) -> None:
        self.calls = calls
        self.warnings: list[str] = []

    def step(self, task: Any, record: dict[str, Any]) -> None:
        at, call = self.calls.get(task.name, (0, lambda: None))
        if record["step"] == at:
            call()

    def warn(self, line: str) -> None:
        self.warnings.append(line)

    fault = warn


def test_a_run_with_a_limit_publishes_its_memory(tiny_base: Path, tmp_path: Path) -> None:
    seen: list[Any] = []
    data = run_data(tiny_base, tmp_path, scheduler={"memory_limit": "64GiB"})
    data["adapters"][0]["priority"] = 2
    asking = Asking(second=(3, lambda: seen.append(read_status(tmp_path / "run"))))
    assert train(resolve_config(data, folder=tmp_path), reporter=asking).exit_code == 0
    (status,) = seen
    assert status.status == "running"
    memory = status.memory
    assert memory["limit_bytes"] == 64 * 2**30
    assert 0 < memory["base_bytes"] < memory["predicted_bytes"] < memory["limit_bytes"]
    assert {name: task.state for name, task in status.tasks.items()} == {
        "first": "running",
        "second": "running",
    }
    assert all(
        task.view["states_bytes"] > 0 and task.view["batch_bytes"] > 0 for task in status.tasks.values()
    )
    assert status.tasks["first"].priority == 2
    with TaskQueue(tmp_path / "run" / "queue.sqlite") as queue:
        views, run = queue.views()
    assert views == {}
    assert run["memory"]["peak_bytes"] >= max(
        record.get("peak_memory_bytes", 0) for record in read_metrics(tmp_path / "run" / "metrics.jsonl")
    )


def test_a_limit_that_comes_when_some_have_ended(tiny_base: Path, tmp_path: Path) -> None:
    """With the memory of real dry runs, which know nothing of tasks that have ended."""
    data = five_tasks(tiny_base, tmp_path) | {"output_dir": "run"}
    del data["scheduler"]
    config = resolve_config(data, folder=tmp_path)
    first = train(config, reporter=Watching({("low", 5): interrupt}))
    assert "finished" in {adapter.state for adapter in first.adapters.values()}
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("memory_limit: null", "memory_limit: 8GiB"))
    assert "8GiB" in path.read_text()
    assert resume(tmp_path / "run").exit_code == 0
    assert weights(tmp_path / "run").keys() == {adapter["name"] for adapter in data["adapters"]}


def test_views_that_cannot_be_written_do_not_end_a_run(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = run_data(tiny_base, tmp_path)
    path = tmp_path / "run" / "queue.sqlite"
    monkeypatch.setattr(TaskQueue, "show", lambda queue, *views: queue._read("{oops", _HeldQueue))
    asking = Asking()
    assert train(resolve_config(data, folder=tmp_path), reporter=asking).exit_code == 0
    (warning,) = asking.warnings
    assert warning.startswith(f"{path}: is damaged")
    assert warning.endswith("`mlora status` does not show who waits, nor memory, any more")


def test_a_queue_that_was_removed(tiny_base: Path, tmp_path: Path) -> None:
    """Its requests count from 1 again; the checkpoint has taken two."""
    folder = tmp_path / "run"

    def ask() -> None:
        change(folder, "pause", ["first"])
        change(folder, "unpause", ["first"])

    config = resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path)
    asking: Reporter = Watching({("first", 2): ask, ("first", 4): interrupt})
    assert train(config, reporter=asking).status == "interrupted"
    (folder / "queue.sqlite").unlink()
    change(folder, "cancel", ["first"])
    told = Asking()
    assert resume(folder, reporter=told).exit_code == 0
    said = "is new, or older than the checkpoint; later requests are lost"
    assert told.warnings == [f"{folder}/queue.sqlite: {said}"]
    assert states(folder) == {"first": "cancelled", "second": "finished"}


def test_an_older_copy_of_the_queue(tiny_base: Path, tmp_path: Path) -> None:
    """What it holds was taken already: the submitted task goes on, and nothing is paused again."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    task = write_task(tmp_path)

    def ask() -> None:
        submit(folder, [task])
        change(folder, "pause", ["first"])

    def undo() -> None:
        shutil.copyfile(folder / "queue.sqlite", copy)
        change(folder, "unpause", ["first"])

    config = resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path)
    asking = Watching({("first", 1): ask, ("second", 4): undo, ("first", 3): interrupt})
    assert train(config, reporter=asking).status == "interrupted"
    shutil.copyfile(copy, folder / "queue.sqlite")
    told = Asking()
    assert resume(folder, reporter=told).exit_code == 0
    assert len(told.warnings) == 1
    assert states(folder) == {"first": "finished", "second": "finished", "third": "finished"}


@contextmanager
def at_work(folder: Path, path: Path) -> Iterator[subprocess.Popen[str]]:
    """`mlora train` in a process of its own, which is ended when nobody needs it any more."""
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlora", "train", str(path)],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(folder: Path, process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for something that a run at work does."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, (folder / "log.txt").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)


def steps(run_dir: Path, name: str) -> int:
    """How many steps a task has made."""
    if not (run_dir / "metrics.jsonl").is_file():
        return 0
    return sum(record["adapter"] == name for record in read_metrics(run_dir / "metrics.jsonl"))


def keeper_and(data: dict[str, Any], **keeper: Any) -> dict[str, Any]:
    """A run of the second task and one that goes on until it is cancelled."""
    data["adapters"][0] = {
        "name": "keeper",
        "dataset": "one",
        "per_device_train_batch_size": 1,
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        **keeper,
    }
    return data


def losses(run_dir: Path, name: str) -> list[float]:
    return [record["loss"] for record in lines(run_dir) if record["adapter"] == name]


def test_a_run_at_work_takes_requests(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["defaults"] |= {"learning_rate": 1e-3, "save_steps": 100}
    data["adapters"][1]["max_steps"] = 150
    alone = data | {"adapters": [data["adapters"][1], THIRD], "output_dir": str(tmp_path / "alone")}
    assert train(resolve_config(alone, folder=tmp_path)).exit_code == 0
    keeper_and(data, max_steps=10**6)
    folder = tmp_path / "run"
    with at_work(tmp_path, write_run(tmp_path, data)) as process:
        until(tmp_path, process, lambda: steps(folder, "second") > 0)
        told = run("pause", folder, "second").stdout.splitlines()
        assert told == ["second: will be paused", "the run is active and applies this at its next iteration"]
        assert run("submit", folder, write_task(tmp_path)).exit_code == 0
        until(tmp_path, process, lambda: states(folder).get("third") == "finished")
        assert states(folder) == {"keeper": "running", "second": "paused", "third": "finished"}
        stood = steps(folder, "second")
        beyond = steps(folder, "keeper") + 3
        until(tmp_path, process, lambda: steps(folder, "keeper") > beyond)
        assert steps(folder, "second") == stood < 150
        assert run("unpause", folder, "second").exit_code == 0
        until(tmp_path, process, lambda: states(folder)["second"] == "finished")
        assert run("cancel", folder, "keeper").exit_code == 0
        assert process.wait(timeout=PATIENCE) == 0, (tmp_path / "log.txt").read_text()
    assert states(folder) == {"keeper": "cancelled", "second": "finished", "third": "finished"}
    assert sorted(weights(folder)) == ["second", "third"]
    for name in ("second", "third"):
        assert losses(folder, name) == pytest.approx(losses(tmp_path / "alone", name), abs=1e-5)


@pytest.mark.nightly  # `die` and `interrupt` do the same in one process, in test_scheduled_training
@pytest.mark.parametrize("save_steps", [None, 10])
def test_a_kill_after_a_request_was_taken(
    run: Run, tiny_base: Path, tmp_path: Path, save_steps: int | None
) -> None:
    data = keeper_and(run_data(tiny_base, tmp_path), max_steps=250)
    data["defaults"]["save_steps"] = save_steps
    data["adapters"][1]["max_steps"] = 250
    folder, copy, later = (tmp_path / name for name in ("run", "copy", "later"))
    with at_work(tmp_path, write_run(tmp_path, data)) as process:
        until(tmp_path, process, lambda: steps(folder, "second") > 0)
        change(folder, "pause", ["second"])
        submit(folder, [write_task(tmp_path, max_steps=20)])
        until(tmp_path, process, lambda: steps(folder, "third") > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert steps(folder, "keeper") < 250
    before = lines(folder)
    with TaskQueue(folder / "queue.sqlite") as queue:
        entries = queue.entries()
    shutil.copytree(folder, copy)
    shutil.copytree(folder, later)
    for path in (folder, copy):
        assert resume(path).status == "paused"
        assert states(path) == {"keeper": "finished", "second": "paused", "third": "finished"}
    assert lines(folder)[: len(before)] == before
    with TaskQueue(folder / "queue.sqlite") as queue:
        after = queue.entries()
    assert {iteration: after[iteration] for iteration in entries} == entries
    assert lines(copy) == lines(folder)
    assert weights(copy) == weights(folder)
    change(later, "unpause", ["second"])  # of the killed run: taken once the journal was made again
    assert resume(later).status == "finished"
    assert states(later) == {"keeper": "finished", "second": "finished", "third": "finished"}


def test_two_resumes_of_one_copy_are_bit_equal(tiny_base: Path, tmp_path: Path) -> None:
    """Killed right after a request was taken, behind the last checkpoint."""
    data = run_data(tiny_base, tmp_path)
    folder = tmp_path / "run"

    class Dying(Asking):
        def joined(self, task: Any, tasks: Any) -> None:
            self.calls["third"] = (2, self.die)

        def die(self) -> None:
            raise ConnectionAbortedError("died")

    task = write_task(tmp_path, max_steps=20)
    with pytest.raises(ConnectionAbortedError):
        train(
            resolve_config(data, folder=tmp_path),
            reporter=Dying(second=(5, lambda: submit(folder, [task]))),
        )
    before = lines(folder)
    shutil.copytree(folder, tmp_path / "copy")
    for path in (folder, tmp_path / "copy"):
        assert resume(path).exit_code == 0
    assert lines(folder) == lines(tmp_path / "copy")
    assert weights(folder) == weights(tmp_path / "copy")
    assert lines(folder)[: len(before)] == before
    undisturbed = data | {"output_dir": str(tmp_path / "undisturbed")}
    asking = Asking(second=(5, lambda: submit(tmp_path / "undisturbed", [task])))
    assert train(resolve_config(undisturbed, folder=tmp_path), reporter=asking).exit_code == 0
    assert lines(folder) == lines(tmp_path / "undisturbed")
    assert weights(folder) == weights(tmp_path / "undisturbed")


class Killed(BaseException):
    """Ends a run at once, as a kill does."""


def kill_before(monkeypatch: pytest.MonkeyPatch, write: int) -> Callable[[], None]:
    """Return what makes the n-th write of this thread, the journal's or a renamed file, a kill."""
    left, me = [0], threading.current_thread()

    def wrap(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            left[0] -= threading.current_thread() is me
            if left[0] == 0:
                raise Killed
            return plain(*arguments)

        monkeypatch.setattr(owner, name, wrapped)

    wrap(TaskQueue, "write_entry")
    wrap(os, "rename")
    wrap(os, "replace")
    return lambda: left.__setitem__(0, write)


# the journal, the adapter's folder, its card; a kill before the journal leaves the request to be taken
@pytest.mark.parametrize(("paused", "write"), [(False, 2), (False, 3), (True, 1), (True, 2)])
def test_a_kill_while_a_task_is_stopped_loses_no_step(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool, write: int
) -> None:
    """It ends with the step at which its user stopped it, though no checkpoint knows of any step."""
    data = run_data(tiny_base, tmp_path)
    data["defaults"]["save_steps"] = None

    def asking(name: str, arm: Callable[[], object] = lambda: None) -> Asking:
        def ask(kind: Any) -> None:
            change(tmp_path / name, kind, ["second"])
            if kind == "stop":
                arm()

        stop = (2 if paused else 1, lambda: ask("stop"))  # iteration 6, or 3
        return Asking(first=stop, second=(3 if paused else 99, lambda: ask("pause")))

    whole = resolve_config(data | {"output_dir": "whole"}, folder=tmp_path)
    result = train(whole, reporter=asking("whole")).adapters["second"]
    assert (result.state, result.message) == ("finished", "stopped on request at step 3")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        train(resolve_config(data, folder=tmp_path), reporter=asking("run", kill_before(patch, write)))
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
    assert resume(tmp_path / "run").adapters["second"].message == result.message
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
