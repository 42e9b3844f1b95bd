"""What the thread that writes checkpoints does to the disk, told of before it does it, so that it can be held
up, or the files copied as a kill at this moment would leave them."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Told = Callable[[str, Path], None]


def watch_disk(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    """Call `told` with `sync`, `rename` (and the new name) or `remove`, and a path."""

    def wrap(name: str, what: str, path_of: Callable[..., Path]) -> None:
        plain = getattr(os, name)

        def wrapped(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("mlora-checkpoint"):
                told(what, path_of(*arguments))
            return plain(*arguments)

        monkeypatch.setattr(os, name, wrapped)

    wrap("fsync", "sync", lambda descriptor: Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    wrap("replace", "rename", lambda old, new: Path(new))
    wrap("unlink", "remove", Path)


def writing_threads() -> list[str]:
    """Threads that write checkpoints, by their names."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mlora-checkpoint")]


def copy_as_killed(run: Path, to: Path) -> Path:
    """Copy a run's folder while training goes on; what it writes at this moment under a temporary name is
    left out, but for checkpoints."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(".") and Path(folder).name != "checkpoints"]

    return Path(shutil.copytree(run, to, ignore=ignored))
