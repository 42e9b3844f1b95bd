"""Full disks, failed reads and lost files in runs with `method: full`: one clear line, nothing is lost."""

import errno
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from limited_runs import Watching, interrupt
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.offload import disk as disks
from mlora.offload import optimizer_states, saved_tensors, states_on_disk, swap_space
from mlora.offload.disk import Disk
from mlora.offload.optimizer_states import OptimizerStates
from mlora.offload.options import OffloadOptions
from mlora.offload.states_on_disk import write_states
from mlora.run.run import resume, train
from tiny_run import save_base

from tests.mlora.offload.full_runs import BLOCKS, ON_DISK, assert_same, full_data, run_of

STEPS = 4


@pytest.fixture(autouse=True, scope="module")
def _small_things_leave_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_tensors, "SMALLEST", 256)
        patch.setattr(optimizer_states, "SMALL", 64)
        patch.setattr(optimizer_states, "UNIT", 2048)
        patch.setattr(swap_space, "CHUNK", 1 << 20)
        patch.setattr("mlora.config.sections.OffloadOptions", partial(OffloadOptions, poison=True))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), layers=BLOCKS)


def data_of(base: Path, folder: Path, **offload: Any) -> dict[str, Any]:
    (folder / "scratch").mkdir(parents=True)
    offload = ON_DISK | {"folders": ["scratch"]} | offload
    data = full_data(base, folder, offload=offload)
    data["defaults"] |= {"max_steps": STEPS, "save_steps": 1}
    del data["adapters"][0]["eval_dataset"], data["adapters"][0]["eval_steps"]
    data["adapters"][0]["gradient_accumulation_steps"] = 2
    return data


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return run_of(data_of(base, folder), folder)


def fault_of(action: Callable[[], object]) -> str:
    with pytest.raises(RunError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)


def begin_and_interrupt(base: Path, folder: Path, step: int) -> None:
    config = resolve_config(data_of(base, folder), folder=folder)
    assert train(config, reporter=Watching({("all", step): interrupt})).status == "interrupted"


def states_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "states").iterdir())


def on_call(number: int, code: int, function: Callable[..., Any], file: str) -> Callable[..., Any]:
    """The function, of which one call fails."""
    calls = 0

    def wrapped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(code, os.strerror(code), file)
        return function(*arguments)

    return wrapped


@pytest.mark.parametrize("ends", [False, True], ids=["in the middle", "as it is interrupted"])
def test_no_room_for_a_checkpoint(
    base: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    reporter = Watching({("all", 3): interrupt} if ends else {})
    data = data_of(base, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", on_call(3, errno.ENOSPC, os.posix_fallocate, ""))
        message = fault_of(lambda: run_of(data, tmp_path, reporter))
    path = tmp_path / "run" / "states" / "all.full-00000003.bin"
    assert f"{path}: No space left on device: no room for " in message
    assert message.endswith(f"; put that right, then go on with `mlora resume {tmp_path}/run`")
    assert states_in(tmp_path) == [f"all.full-{step:08d}.bin" for step in (1, 2)]
    assert resume(tmp_path / "run").exit_code == 0
    assert_same(tmp_path / "run", whole)


class Failing:
    """A transfer that fails at its n-th call."""

    def __init__(self, number: int, what: str, inner: Any) -> None:
        self._left, self._what, self._inner = number, what, inner

    def __call__(self, disk: Disk, file: Any, offset: int, memory: Any, size: int | None = None) -> Any:
        ticket = self._inner(disk, file, offset, memory, size)
        self._left -= 1
        if self._left:
            return ticket

        def wait() -> None:
            ticket.wait()
            message = f"{self._what} {size} bytes at offset {offset} failed: {os.strerror(errno.EIO)}"
            raise OSError(errno.EIO, message, file.path)

        return SimpleNamespace(wait=wait, done=True, span=ticket.span)


@pytest.mark.parametrize(("what", "number"), [("read", 250), ("write", 300)])
def test_a_transfer_that_fails(
    base: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, number: int
) -> None:
    """Of weights, of states, of activations or of a checkpoint, as it comes.

    A failed write of activations that are still in memory may go unnoticed, as nothing is lost.
    """
    data = data_of(base, tmp_path, activations="swap" if what == "read" else "keep")
    with monkeypatch.context() as patch:
        word = {"read": "reading", "write": "writing"}[what]
        failing = Failing(number, word, getattr(Disk, what))
        patch.setattr(Disk, what, lambda *args: failing(*args))
        message = fault_of(lambda: run_of(data, tmp_path))
    assert f": {word} " in message
    assert " at offset " in message
    assert "failed: Input/output error" in message
    assert not list((tmp_path / "scratch").iterdir())
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert resume(tmp_path / "run").exit_code == 0
    assert_same(tmp_path / "run", whole)


@pytest.mark.parametrize("call", [BLOCKS + 1, BLOCKS + 2], ids=["states", "activations"])
def test_no_room_for_scratch(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    data = data_of(base, tmp_path, activations="swap")
    folder = str(tmp_path / "scratch")
    with monkeypatch.context() as patch:
        failing = on_call(call, errno.ENOSPC, Disk.scratch, folder)
        patch.setattr(Disk, "scratch", lambda *args: failing(*args))
        message = fault_of(lambda: run_of(data, tmp_path))
    assert f"{folder}: No space left on device" in message
    assert not list((tmp_path / "scratch").iterdir())


def test_a_folder_that_is_gone_when_a_run_resumes(base: Path, whole: Path, tmp_path: Path) -> None:
    begin_and_interrupt(base, tmp_path, 2)
    (tmp_path / "scratch").rmdir()
    assert f"{tmp_path}/scratch" in fault_of(lambda: resume(tmp_path / "run"))
    (tmp_path / "scratch").mkdir()
    assert resume(tmp_path / "run").exit_code == 0
    assert_same(tmp_path / "run", whole)


class Told(Watching):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def warn(self, line: str) -> None:
        self.warnings.append(line)


def cut_short(newer: Path) -> str:
    size = newer.stat().st_size
    os.truncate(newer, size - 4096)
    (newer.parent / f"{newer.name}.new").write_bytes(b"half")  # as a kill leaves it
    return f": {newer}: is damaged: expected {size} bytes, got {size - 4096}"


def bit_flipped(seed: int, newer: Path) -> str:
    content = bytearray(newer.read_bytes())
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << (bit % 8)
    newer.write_bytes(content)
    return f"{newer}: is damaged or was changed: its checksum differs"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(cut_short, id="cut short"),
        pytest.param(partial(bit_flipped, 0), id="0"),
        *(pytest.param(partial(bit_flipped, n), marks=pytest.mark.nightly, id=str(n)) for n in range(1, 10)),
    ],
)
def test_a_checkpoint_with_damaged_weights_gives_way_to_the_one_before(
    base: Path, whole: Path, tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    begin_and_interrupt(base, tmp_path, 3)
    message = damage(tmp_path / "run" / "states" / states_in(tmp_path)[-1])
    told = Told()
    assert resume(tmp_path / "run", reporter=told).exit_code == 0
    (line,) = told.warnings
    assert line.endswith(f"{message}; trying the one before")
    assert_same(tmp_path / "run", whole)
    assert not list((tmp_path / "run").rglob("*.new"))


def test_a_run_without_any_weights_says_so(base: Path, tmp_path: Path) -> None:
    begin_and_interrupt(base, tmp_path, 2)
    paths = [tmp_path / "run" / "states" / name for name in states_in(tmp_path)]
    for path in paths:
        path.unlink()
    told = Told()
    with pytest.raises(RunError, match="no checkpoint is whole; put the file back, or train anew") as error:
        resume(tmp_path / "run", reporter=told)
    for line, path in zip([*told.warnings, str(error.value)], reversed(paths), strict=True):
        assert f": {path}: No such file or directory" in line


def test_a_file_that_is_written_again_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a resume that is interrupted before the next step: an older checkpoint names the same file."""
    disk, path = Disk([tmp_path]), tmp_path / "states" / "all.full-00000001.bin"
    states = OptimizerStates({"w": 5000}, disk, on_disk=True)
    states.put("w", torch.arange(5000.0))
    write_states(path, states)
    before = path.read_bytes()
    monkeypatch.setattr(states_on_disk.os, "replace", on_call(1, errno.EIO, os.replace, str(path)))
    with pytest.raises(OSError, match="Input/output error"):
        write_states(path, states)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    write_states(path, states)
    assert path.read_bytes() == before


def test_a_file_system_without_direct_reads_is_told_of_once(
    base: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = disks.File

    class Buffered:
        open = staticmethod(lambda path: inner.open(path, False))
        scratch = staticmethod(lambda folders, size: inner.scratch(folders, size, False))

    monkeypatch.setattr(disks, "File", Buffered)
    told = Told()
    run = run_of(data_of(base, tmp_path, activations="swap"), tmp_path, told)
    (line,) = told.warnings
    assert "is on a file system without direct reads and writes" in line
    assert_same(run, whole)
