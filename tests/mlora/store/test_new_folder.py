"""A folder that appears whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlora.errors import RunError
from mlora.store.new_folder import new_folder
from safetensors import SafetensorError

SLOW = """
import pathlib, sys, time
from mlora.store.new_folder import new_folder
with new_folder(pathlib.Path(sys.argv[1]), "--output") as scratch:
    (scratch / "half").write_text("x")
    print("ready", flush=True)
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(folder: Path) -> None:
    with new_folder(folder, "--output") as scratch:
        assert scratch.parent == folder.parent
        assert names(scratch) == []
        (scratch / "a").write_text("1")


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "out", "--output") as scratch:
        (scratch / "a").write_text("1")
        assert not (tmp_path / "deep" / "out").exists()
    assert names(tmp_path / "deep") == ["out"]
    assert names(tmp_path / "deep" / "out") == ["a"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert names(tmp_path / "empty") == ["a"]


def test_parents_that_were_made_go_with_a_folder_that_failed(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ZeroDivisionError):
        failing(tmp_path / "old" / "new" / "deep" / "out", ZeroDivisionError())
    assert names(tmp_path) == ["old"]
    assert names(tmp_path / "old") == []


def failing(folder: Path, fault: Exception) -> None:
    with new_folder(folder, "--output") as scratch:
        (scratch / "b").mkdir()
        (scratch / "b" / "c").write_text("1")
        raise fault


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "cannot be written: No space left on device"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "cannot be written: No space left on device",
        ),
        (SafetensorError("something else"), "cannot be written: something else"),
    ],
)
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, fault: Exception, expected: str) -> None:
    with pytest.raises(RunError) as caught:
        failing(tmp_path / "out", fault)
    assert str(caught.value) == f"--output: {tmp_path / 'out'} {expected}"
    assert names(tmp_path) == []


def test_an_error_of_the_block_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        failing(tmp_path / "out", ZeroDivisionError())
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["full", "file"])
def test_what_is_in_the_way_stays(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "full":
        out.mkdir()
        (out / "mine").write_text("x")
    else:
        out.write_text("x")
    with pytest.raises(RunError, match=f"--output: {out} is (not empty|a file)"):
        write(out)
    assert names(tmp_path) == ["out"]


def test_what_comes_in_the_way_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with ExitStack() as stack:
        stack.enter_context(new_folder(out, "--output"))
        out.mkdir()
        (out / "mine").write_text("x")
        with pytest.raises(RunError, match="is not empty"):
            stack.close()
    assert names(tmp_path) == ["out"]
    assert (out / "mine").read_text() == "x"


def test_a_killed_process_is_in_nobodys_way(tmp_path: Path) -> None:
    """While it lives, nobody else writes the folder; what it leaves, the next one removes."""
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(RunError, match=f"--output: another process is writing {out}; wait for it"):
            write(out)
        assert names(tmp_path) == [".out.unfinished"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.communicate()
    assert names(tmp_path / ".out.unfinished") == ["half"]
    write(out)
    assert names(tmp_path) == ["out"]
    assert names(out) == ["a"]


def test_a_scratch_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could put links there."""
    (tmp_path / ".out.unfinished").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RunError, match=r"\.out\.unfinished is another user's; choose another folder"):
        write(tmp_path / "out")
    assert names(tmp_path) == [".out.unfinished"]
