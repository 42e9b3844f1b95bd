"""Checkpoints of a run: their names, and how they are saved, removed and loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlora.errors import RunError, first_fault
from mlora.files.disk import read_tensors, write_tensors

PATTERN = re.compile(r"step-(\d{8})\.pt")
FORMAT = 12


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
    rounds: dict[str, Any] = Field(default_factory=dict)


def checkpoint_name(iteration: int) -> str:
    """Returns the file name of the checkpoint after `iteration` iterations of the run."""
    return f"step-{iteration:08d}.pt"


def save_checkpoint(folder: Path, iteration: int, payload: dict[str, Any], keep: int) -> None:
    """Saves a checkpoint and removes all but the newest `keep`; earlier ones survive a failed write."""
    path = folder / checkpoint_name(iteration)
    try:
        write_tensors(path, {"format": FORMAT, **payload})
    except RunError as error:
        intact = "; earlier checkpoints are intact" if list_checkpoints(folder) else ""
        raise RunError(f"{error}{intact}") from error
    older = [old for old in list_checkpoints(folder) if old.name < path.name]  # later ones are damaged
    for old in older[::-1][keep - 1 :]:
        old.unlink(missing_ok=True)
    for left in folder.glob(".step-*.pt.tmp"):  # of a process that was killed while it wrote
        left.unlink(missing_ok=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, the oldest first; the folder may be missing."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if PATTERN.fullmatch(path.name))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Reads one checkpoint; its tensors are read from the file when they are used.

    Raises RunError if it cannot be read, or is not a checkpoint of this version.
    """
    payload: dict[str, Any] = read_tensors(path, mmap=True)
    _check(path, payload)
    return payload


def _check(path: Path, payload: Any) -> None:
    """Raises RunError if the content of a file is not a checkpoint of this version."""
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise RunError(
            f"{path}: was written by another version of mlora; use that one, or train anew with "
            "`mlora train RUN.yaml --overwrite`"
        )
    try:
        _Payload.model_validate(payload)
    except ValidationError as error:
        raise RunError(f"{path}: is not a checkpoint of a run: {first_fault(error)}") from error


def load_checkpoint(
    folder: Path,
    warn: Callable[[str], None],
    lacks: Callable[[Mapping[str, Any]], str | None] = lambda checkpoint: None,
) -> dict[str, Any] | None:
    """Loads the newest checkpoint that can be read, on the CPU; None if there are no checkpoints.

    `warn` is told of each one that cannot be read, or that `lacks` something: it says what is wrong with
    another file of the checkpoint. RunError if none is whole, or if the newest readable file is not a
    checkpoint of this version.
    """
    paths = list_checkpoints(folder)
    for path in reversed(paths):
        before = "" if path == paths[0] else "; trying the one before"
        try:
            payload: dict[str, Any] = read_tensors(path)
        except RunError as error:
            warn(f"{error}{before}")
            continue
        _check(path, payload)
        if (lacking := lacks(payload)) is not None:
            warn(f"{path}: {lacking}{before}")
            continue
        return payload
    if paths:
        raise RunError(
            f"{folder}: no checkpoint can be read; train anew with `mlora train RUN.yaml --overwrite`"
        )
    return None
