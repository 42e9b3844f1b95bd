"""Atomic writes, after which a file is either whole or not there, and checkpoints."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlora.errors import RunError, first_fault

PATTERN = re.compile(r"step-(\d{8})\.pt")
FORMAT = 10


class _Payload(BaseModel):
    """The part of a checkpoint that the run reads before its adapters read theirs."""

    model_config = ConfigDict(strict=True)

    iteration: int = Field(ge=0)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    metrics_bytes: int = Field(ge=0)
    config: dict[str, Any]
    decisions: dict[str, Any]
    refused: dict[str, str]
    data: dict[str, list[str]]
    tasks: dict[str, dict[str, Any]]
    total_steps: dict[str, int]
    adapters: dict[str, dict[str, Any]]


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file under a temporary name, makes it durable, then renames it.

    The old file stays until the new one is whole. A failure removes the temporary file.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def checkpoint_name(iteration: int) -> str:
    """Returns the file name of the checkpoint after `iteration` iterations of the run."""
    return f"step-{iteration:08d}.pt"


def save_checkpoint(folder: Path, iteration: int, payload: dict[str, Any], keep: int) -> Path:
    """Saves a checkpoint and removes all but the newest `keep`; earlier ones survive a failed write."""
    import torch

    path = folder / checkpoint_name(iteration)
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync_folder(folder.parent)
        write_file(path, lambda file: torch.save({"format": FORMAT, **payload}, file))
    except (OSError, RuntimeError) as error:
        # torch reports a failed write as a RuntimeError whose context is the system's error
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        intact = "; earlier checkpoints are intact" if list_checkpoints(folder) else ""
        raise RunError(f"{path}: cannot be saved: {cause.strerror}{intact}") from error
    older = [old for old in list_checkpoints(folder) if old.name < path.name]  # later ones are damaged
    for old in older[::-1][keep - 1 :]:
        old.unlink(missing_ok=True)
    for left in folder.glob(".step-*.pt.tmp"):  # of a process that was killed while it wrote
        left.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, the oldest first; the folder may be missing."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if PATTERN.fullmatch(path.name))


def load_checkpoint(folder: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
    """Loads the newest checkpoint that can be read, on the CPU; None if there are no checkpoints.

    `warn` is told of each one that cannot be read. RunError if none can, or if the newest readable file is
    not a checkpoint of this version.
    """
    import pickle

    import torch

    paths = list_checkpoints(folder)
    for path in reversed(paths):
        try:
            payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnicodeDecodeError, pickle.UnpicklingError) as error:
            # EINVAL: torch seeks before the start of a file that was cut short
            named = isinstance(error, OSError) and error.errno != errno.EINVAL and error.strerror
            reason = named or "it is damaged or not whole"
            then = "" if path == paths[0] else "; trying the one before"
            warn(f"{path}: cannot be read: {reason}{then}")
            continue
        if not isinstance(payload, dict) or payload.get("format") != FORMAT:
            raise RunError(f"{path}: was written by another version of mlora")
        try:
            _Payload.model_validate(payload)
        except ValidationError as error:
            raise RunError(f"{path}: is no checkpoint of a run: {first_fault(error)}") from error
        return payload
    if paths:
        raise RunError(f"{folder}: no checkpoint can be read; train anew with --overwrite")
    return None
