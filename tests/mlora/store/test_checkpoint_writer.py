"""Checkpoints behind training's back: what is written, in which order, and how it ends."""

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.reporter import Reporter
from mlora.run.run import resume, train
from mlora.store.checkpoint import list_checkpoints
from mlora.store.checkpoint_writer import CheckpointWriter
from mlora.store.run_folder import TEMPORARY
from tiny_run import lines, run_data, weights
from watched_disk import copy_as_killed, watch_disk, writing_threads

PATIENCE = 60.0  # seconds


def nothing() -> None:
    """What there is to be made durable before a checkpoint."""


def steps_of(folder: Path) -> list[int]:
    """The iterations of the checkpoints of a run."""
    return [int(path.stem[5:]) for path in list_checkpoints(folder)]


def read(folder: Path, iteration: int) -> dict[str, Any]:
    payload: dict[str, Any] = torch.load(folder / f"step-{iteration:08d}.pt", weights_only=True)
    return payload


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's `checkpoints`, not made yet; no thread is left behind."""
    yield tmp_path / "checkpoints"
    assert writing_threads() == []


def test_the_order_on_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, the file, its name, and only then is the one before removed."""
    seen: list[tuple[str, str]] = []
    watch_disk(monkeypatch, lambda what, path: seen.append((what, path.name)))
    with (
        open(folder.parent / "metrics.jsonl", "wb") as metrics,
        CheckpointWriter(folder, 1, lambda: os.fsync(metrics.fileno())) as writer,
    ):
        for iteration in (4, 8):
            writer.start(iteration, {}, [])
    first, second = (name for what, name in seen if what == "sync" and name.startswith(".step-"))
    assert [TEMPORARY.sub(r"\1", name) for name in (first, second)] == [
        "step-00000004.pt",
        "step-00000008.pt",
    ]
    expected = [("sync", "metrics.jsonl"), ("sync", folder.parent.name), ("sync", first)]
    expected += [("rename", "step-00000004.pt"), ("remove", first), ("sync", "checkpoints")]
    expected += [("sync", "metrics.jsonl"), ("sync", second), ("rename", "step-00000008.pt")]
    expected += [("remove", second), ("sync", "checkpoints"), ("remove", "step-00000004.pt")]
    assert seen == expected


def test_one_at_a_time(folder: Path) -> None:
    """The states of the second are not taken before the first is whole."""
    may_write, asked = threading.Event(), threading.Event()

    def states() -> Iterator[tuple[str, Mapping[str, Any]]]:
        assert steps_of(folder) == [4]
        asked.set()
        yield "a", {"weights": {"w": torch.ones(3)}}

    with CheckpointWriter(folder, 2, lambda: may_write.wait(PATIENCE)) as writer:
        writer.start(4, {}, [])
        timer = threading.Timer(0.2, may_write.set)
        timer.start()
        assert not asked.is_set()
        writer.check()
        writer.start(8, {}, states())
        assert asked.is_set()
        writer.wait()
        assert steps_of(folder) == [4, 8]
        assert len(writing_threads()) == 1
        timer.join()


def test_a_signal_while_the_end_is_awaited(folder: Path) -> None:
    """The checkpoint in writing is finished all the same."""
    may_write = threading.Event()
    timers = [
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)),
        threading.Timer(0.6, may_write.set),
    ]

    def write() -> None:
        with CheckpointWriter(folder, 2, lambda: may_write.wait(PATIENCE)) as writer:
            writer.start(4, {}, [])
            for timer in timers:
                timer.start()

    with pytest.raises(KeyboardInterrupt):
        write()
    assert steps_of(folder) == [4]
    for timer in timers:
        timer.join()


def test_what_is_written_is_what_was_there(folder: Path) -> None:
    may_write = threading.Event()
    payload = {"groups": {"a": 0}, "data": {"a": ["x"]}}
    state = {"moments": {"w": [torch.zeros(3), torch.ones(3)]}, "steps": 1}
    with CheckpointWriter(folder, 2, lambda: may_write.wait(PATIENCE)) as writer:
        writer.start(4, payload, [("a", state)])
        payload["groups"]["a"], state["steps"] = 1, 2
        payload["data"]["a"].append("y")
        state["moments"]["w"].pop()
        may_write.set()
    found = read(folder, 4)
    assert (found["groups"], found["data"]) == ({"a": 0}, {"a": ["x"]})
    assert found["adapters"]["a"]["steps"] == 1
    assert [m.tolist() for m in found["adapters"]["a"]["moments"]["w"]] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.gpu
def test_what_is_written_of_a_gpu_is_what_was_there(folder: Path) -> None:
    """The copy waits in the stream behind work, and what changes the tensor comes after it."""
    tensor, factor = torch.zeros(1 << 22, device="cuda"), torch.rand(4096, 4096, device="cuda")
    turned = torch.zeros(512, 1024, device="cuda").t()
    with CheckpointWriter(folder, 2, nothing) as writer:
        for _ in range(50):
            factor = (factor @ factor).softmax(-1)
        tensor += 1
        turned += 1
        writer.start(4, {}, [("a", {"weights": {"w": tensor, "turned": turned}})])
        tensor += 1
        turned += 1
    found = read(folder, 4)["adapters"]["a"]["weights"]
    assert found["w"].device.type == "cpu"
    assert torch.equal(found["w"], torch.ones(1 << 22))
    assert torch.equal(found["turned"], torch.ones(1024, 512))


@pytest.mark.parametrize("call", ["start", "check", "wait", "exit"])
def test_an_error_is_told_once(folder: Path, call: str) -> None:
    folder.write_text("in the way")
    told = rf"^{folder}/step-00000004\.pt: cannot be saved: (File exists|Not a directory)$"
    with pytest.raises(RunError, match=told), CheckpointWriter(folder, 2, nothing) as writer:  # noqa: PT012
        writer.start(4, {}, [])
        while call == "check":
            writer.check()
        if call == "wait":
            writer.wait()
        if call == "start":
            writer.start(8, {}, [])


def test_after_an_error_that_was_told(folder: Path) -> None:
    folder.write_text("in the way")
    with CheckpointWriter(folder, 2, nothing) as writer:
        writer.start(4, {}, [])
        with pytest.raises(RunError):
            writer.wait()
        writer.check()
        writer.wait()
        folder.unlink()
        writer.start(8, {}, [])
    assert steps_of(folder) == [8]


def test_an_error_that_nobody_expects(folder: Path) -> None:
    with CheckpointWriter(folder, 2, lambda: 1 // 0) as writer:
        writer.start(4, {}, [])
        with pytest.raises(ZeroDivisionError):
            writer.wait()
    assert not folder.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ConnectionAbortedError])
def test_an_error_while_a_checkpoint_is_written(folder: Path, error: type[BaseException]) -> None:
    """It ends the block as ever, and the checkpoint is whole; what is wrong with that is noted."""
    may_write = threading.Event()
    with pytest.raises(error), CheckpointWriter(folder, 2, lambda: may_write.wait(PATIENCE)) as writer:  # noqa: PT012
        writer.start(4, {}, [])
        threading.Timer(0.1, may_write.set).start()
        raise error
    assert steps_of(folder) == [4]
    with pytest.raises(error) as info, CheckpointWriter(folder / "step-00000004.pt", 2, nothing) as writer:  # noqa: PT012
        writer.start(8, {}, [])
        raise error
    (note,) = info.value.__notes__
    assert note.startswith(f"and in the thread that writes checkpoints: {folder}/step-00000004.pt/step-000")


class Steps(Reporter):
    """Counts optimizer steps of all adapters, and sends SIGINT after one of them.

    Args:
        interrupt: after which.
    """

    def __init__(self, interrupt: int = 0) -> None:
        self.count, self.interrupt = 0, interrupt
        self.grew = threading.Condition()

    def step(self, task: Any, record: dict[str, Any]) -> None:
        with self.grew:
            self.count += 1
            self.grew.notify_all()
        if self.count == self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)

    def wait_for(self, count: int) -> None:
        """Wait until so many steps were made."""
        with self.grew:
            assert self.grew.wait_for(lambda: self.count >= count, PATIENCE)


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    """A run's config; a run of it that was not disturbed is in the folder `whole`, with all checkpoints."""
    data = run_data(tiny_base, tmp_path)
    data["save_total_limit"] = 99
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    assert writing_threads() == []
    return data


def ends_as_whole(run: Path) -> None:
    """Resume a run; it ends as the undisturbed one beside it."""
    assert resume(run).exit_code == 0
    assert writing_threads() == []
    assert lines(run) == lines(run.parent / "whole")
    assert weights(run) == weights(run.parent / "whole")


def same(found: Any, expected: Any) -> bool:
    """Whether two contents of checkpoints are equal, bit for bit, but for what a clock says."""
    if isinstance(expected, dict):
        clock = {"seconds", "metrics_bytes", "metrics_crc32", "output_dir"}
        return found.keys() == expected.keys() and all(
            key in clock or same(found[key], value) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else bool(found == expected)


def test_training_goes_on_and_changes_nothing(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those after 2, 4, 6 and 8 iterations, and 2, 5, 8 and 10 steps, are held up, before their tensors are
    written, until the next iteration has made its steps."""
    reporter, further = Steps(), [3, 6, 9, 12]

    def told(what: str, path: Path) -> None:
        if path.name == "metrics.jsonl" and further:
            reporter.wait_for(further.pop(0))

    watch_disk(monkeypatch, told)
    assert train(resolve_config(data, folder=tmp_path), reporter=reporter).exit_code == 0
    assert not further
    run, whole = tmp_path / "run" / "checkpoints", tmp_path / "whole" / "checkpoints"
    assert steps_of(run) == steps_of(whole)
    for iteration in steps_of(whole):
        assert same(read(run, iteration), read(whole, iteration)), iteration
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_a_signal_while_a_checkpoint_is_written(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter, held = Steps(interrupt=4), []

    def told(what: str, path: Path) -> None:
        if what == "rename" and not held:
            held.append(path.name)
            reporter.wait_for(4)

    watch_disk(monkeypatch, told)
    result = train(resolve_config(data, folder=tmp_path), reporter=reporter)
    assert (result.status, result.exit_code, reporter.count) == ("interrupted", 130, 4)
    assert held == ["step-00000002.pt"]
    assert steps_of(tmp_path / "run" / "checkpoints") == [2, 3]
    assert not list(tmp_path.rglob("*.tmp"))
    assert writing_threads() == []
    ends_as_whole(tmp_path / "run")


def test_a_second_signal_while_the_last_checkpoint_is_written(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises at once in training, and the process ends as soon as the checkpoint in writing is whole."""
    data["defaults"]["save_steps"] = None

    def told(what: str, path: Path) -> None:
        if what == "rename":
            os.kill(os.getpid(), signal.SIGINT)
            assert not threading.Event().wait(0.3)

    with monkeypatch.context() as patch:
        watch_disk(patch, told)
        patch.setattr("mlora.cluster.signals._ONE_SIGNAL", 0.0)  # the second one comes soon
        with pytest.raises(KeyboardInterrupt):
            train(resolve_config(data, folder=tmp_path), reporter=Steps(interrupt=4))
    assert steps_of(tmp_path / "run" / "checkpoints") == [3]
    assert writing_threads() == []
    ends_as_whole(tmp_path / "run")


def test_a_kill_at_each_moment_of_a_checkpoint(
    data: dict[str, Any], tmp_path: Path, fresh_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the folder as a kill would leave it: all hold together, and some of them are resumed."""
    copies: list[Path] = []
    data["defaults"]["save_steps"], data["save_total_limit"] = 1, 2

    def told(what: str, path: Path) -> None:
        copies.append(copy_as_killed(tmp_path / "run", tmp_path / f"{len(copies)}-{what}-{path.name}"))

    with monkeypatch.context() as patch:
        watch_disk(patch, told)
        train(resolve_config(data, folder=tmp_path))
    finished = 0
    for copy in copies:
        for iteration in steps_of(copy / "checkpoints"):
            found = read(copy / "checkpoints", iteration)
            assert found["metrics_bytes"] <= (copy / "metrics.jsonl").stat().st_size
            ended = {name for name, task in found["tasks"].items() if task["state"] == "finished"}
            assert ended <= weights(copy).keys()
            finished += len(ended)
    assert finished
    kinds = sorted({copy.name.split("-", 1)[1].rstrip("0123456789.pt-") for copy in copies})
    assert len(kinds) > 4, kinds
    order = torch.randperm(len(copies), generator=torch.Generator().manual_seed(fresh_seed)).tolist()
    for copy in (copies[index] for index in order[:5]):
        ends_as_whole(copy)
        assert not list(copy.rglob("*.tmp"))
