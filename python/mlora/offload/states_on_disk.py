"""A folder that holds one whole version of the optimizer's states, however a process ends.

Each version is a file of its own. A small index names the latest whole one and is replaced by a rename.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlora_ext._C import File
from torch import Tensor

from mlora.durable import sync_path, temporary, write_whole
from mlora.offload.disk import Disk
from mlora.offload.optimizer_states import OptimizerStates, Unit
from mlora.offload.options import UNIT

INDEX = "optimizer.json"
_FORMAT = 1


def write_states(path: Path, states: OptimizerStates) -> int:
    """Writes all states to a file, under a temporary name until it is durable; returns its CRC-32.

    Raises OSError if the folder cannot be written or its disk lacks room; nothing is changed then.
    """
    path.parent.mkdir(exist_ok=True)  # a folder that was moved away meanwhile is not made anew
    scratch = temporary(path)
    with ExitStack() as unless_written:
        unless_written.callback(scratch.unlink, missing_ok=True)
        descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.posix_fallocate(descriptor, 0, max(1, states.nbytes))
        except OSError as error:
            what = f"{os.strerror(error.errno or 0)}: no room for {states.nbytes} bytes of optimizer states"
            raise OSError(error.errno, what, str(path)) from error
        finally:
            os.close(descriptor)
        checksum = states.save(File.create(str(scratch)))
        os.replace(scratch, path)
        sync_path(path.parent)
        unless_written.pop_all()
    return checksum


def read_states(path: Path, states: OptimizerStates, disk: Disk) -> Iterator[tuple[Unit, Tensor]]:
    """Takes over the states in a file; yields what `OptimizerStates.load` yields.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it has another size than the states.
    """
    size = path.stat().st_size
    if size != states.nbytes:
        raise ValueError(f"{path}: expected {states.nbytes} bytes, got {size}")
    return states.load(disk.open(path))


def save_version(
    folder: Path, states: OptimizerStates, counts: Mapping[str, int], settings: Sequence[Mapping[str, Any]]
) -> None:
    """Writes a new version, makes it the latest one, and removes the one before.

    `settings` is what JSON can hold, and comes back with `settings_of`.

    Raises OSError; the version before stays then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    latest = _index(folder)["file"] if (folder / INDEX).exists() else "optimizer-0.bin"
    version = int(latest.removeprefix("optimizer-").removesuffix(".bin")) + 1
    path = folder / f"optimizer-{version}.bin"
    write_states(path, states)
    index = {
        "format": _FORMAT,
        "file": path.name,
        "unit": UNIT,
        "numbers": _numbers(states),
        "steps": dict(counts),
        "settings": list(settings),
    }
    write_whole(folder / INDEX, json.dumps(index).encode())
    left = folder.glob(".optimizer*.tmp")  # by processes that were killed
    for other in (*folder.glob("optimizer-*.bin"), *left):
        if other.name != path.name:
            other.unlink()


def settings_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the settings of the latest version. Raises as `load_version`."""
    return list(_index(folder).get("settings", []))


def load_version(
    folder: Path, states: OptimizerStates, disk: Disk
) -> tuple[dict[str, int], Iterator[tuple[Unit, Tensor]]]:
    """Returns the counts of steps of the latest version, and what `read_states` yields.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: it is of another model, or of another size than it should be.
    """
    index, numbers = _index(folder), _numbers(states)
    if index["format"] != _FORMAT or index["unit"] != UNIT:
        raise ValueError(f"{folder / INDEX}: was written by another version of mlora-ext")
    if index["numbers"] != numbers:
        differing = {name for name, _ in set(numbers.items()) ^ set(index["numbers"].items())}
        raise ValueError(f"{folder / INDEX}: is of another model; {min(differing)} differs")
    return index["steps"], read_states(folder / index["file"], states, disk)


def _numbers(states: OptimizerStates) -> dict[str, int]:
    return {name: sum(unit.count for unit in units) for name, units in states.units.items()}


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not {"format", "file", "unit", "numbers", "steps"} <= set(found):
            raise ValueError("keys are missing")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: is not an index of optimizer states: {error}") from error
    return dict(found)
