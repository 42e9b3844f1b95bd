"""A folder that holds one whole version of the optimizer's states, however a process ends.

Each version is a file of its own. A small index names the latest whole one and is replaced by a rename.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlora_ext._C import File
from torch import Tensor

from mlora.offload.disk import Disk
from mlora.offload.optimizer_states import UNIT, OptimizerStates, Unit

INDEX = "optimizer.json"
_FORMAT = 1


def new_version(folder: Path, version: int, states: OptimizerStates) -> File:
    """Makes the file of a new version, with all of its room on the disk.

    Raises OSError if the folder cannot be written or its disk lacks room; nothing is left then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"optimizer-{version}.bin"
    path.unlink(missing_ok=True)  # of a process that was killed
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, max(1, states.nbytes))
    except OSError as error:
        path.unlink()
        raise OSError(
            error.errno, f"{os.strerror(error.errno or 0)} for {states.nbytes} bytes", str(path)
        ) from error
    finally:
        os.close(descriptor)
    return File.create(str(path))


def commit_version(folder: Path, states: OptimizerStates, file: File, counts: Mapping[str, int]) -> None:
    """Completes a version, makes it the latest one, and removes the one before."""
    states.save(file)
    numbers = {name: sum(unit.count for unit in units) for name, units in states.units.items()}
    index = {
        "format": _FORMAT,
        "file": Path(file.path).name,
        "unit": UNIT,
        "numbers": numbers,
        "steps": dict(counts),
    }
    temporary = folder / f"{INDEX}.new"
    with temporary.open("w", encoding="utf-8") as out:
        json.dump(index, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, folder / INDEX)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    for other in folder.glob("optimizer-*.bin"):
        if other.name != index["file"]:
            other.unlink()


def save_states(folder: Path, states: OptimizerStates, counts: Mapping[str, int]) -> None:
    """Writes a new version of all states. Raises OSError; the version before stays then."""
    latest = _index(folder)["file"] if (folder / INDEX).exists() else "optimizer-0.bin"
    version = int(latest.removeprefix("optimizer-").removesuffix(".bin")) + 1
    commit_version(folder, states, new_version(folder, version, states), counts)


def load_states(
    folder: Path, states: OptimizerStates, disk: Disk
) -> tuple[dict[str, int], Iterator[tuple[Unit, Tensor]]]:
    """Returns the counts of steps of the latest version, and what `OptimizerStates.load` yields.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: it is of another model, or of another size than it should be.
    """
    index = _index(folder)
    numbers = {name: sum(unit.count for unit in units) for name, units in states.units.items()}
    if index["format"] != _FORMAT or index["unit"] != UNIT:
        raise ValueError(f"{folder / INDEX}: was written by another version of mlora-ext")
    if index["numbers"] != numbers:
        differing = {name for name, _ in set(numbers.items()) ^ set(index["numbers"].items())}
        raise ValueError(f"{folder / INDEX}: is of another model; {min(differing)} differs")
    path = folder / index["file"]
    if path.stat().st_size != states.nbytes:
        raise ValueError(f"{path}: expected {states.nbytes} bytes, got {path.stat().st_size}")
    return index["steps"], states.load(disk.open(path))


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not {"format", "file", "unit", "numbers", "steps"} <= set(found):
            raise ValueError("keys are missing")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: is not an index of optimizer states: {error}") from error
    return dict(found)
