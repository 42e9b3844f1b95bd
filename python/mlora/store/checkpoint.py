"""Checkpoints of a run: their names, and how they are saved, removed and loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mlora.errors import RunError, first_fault
from mlora.store.disk import read_tensors, write_tensors

PATTERN = re.compile(r"step-(\d{8})\.pt")
FORMAT = 12
_OF_STATE = ("gradients", "units", "rows", "updates", "steps", "scaler")
_OF_ADAPTER, _OF_MODEL = ("weights", "moments", "dropout_seed"), ("counts",)


class _StateGroup(BaseModel):
    iteration: int = Field(ge=0)
    tasks: list[str]
    saves: bool


class _Rounds(BaseModel):
    """What `mlora.tasks.groups.Rounds.state` returns, and whether a callback asked for a checkpoint."""

    settled: int = Field(ge=0)
    groups: dict[int, _StateGroup]
    save_asked: bool


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
    rounds: _Rounds | None = None
    best: list[str] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> _Payload:
        """Refuses a checkpoint that lacks a task, or part of an adapter's state."""
        for name in {**self.tasks, **self.total_steps}:
            if name not in self.tasks or name not in self.total_steps:
                raise ValueError(f"lacks {'tasks' if name in self.total_steps else 'total_steps'}.{name}")
        for name in self.decisions["admission"]["slots"]:
            if name not in self.adapters and self.tasks.get(name, {}).get("state") == "running":
                raise ValueError(f"lacks adapters.{name}")
        for name, state in self.adapters.items():
            for key in (*_OF_STATE, *(_OF_MODEL if "file" in state else _OF_ADAPTER)):
                if key not in state:
                    raise ValueError(f"lacks adapters.{name}.{key}")
        return self


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


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, the oldest first; the folder may be missing."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if PATTERN.fullmatch(path.name))


class _OtherVersion(RunError):
    """A checkpoint was written by another version of mlora."""


def read_checkpoint(path: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Reads one checkpoint; with `mmap`, its tensors are read from the file when they are used.

    Raises RunError if it is damaged, is short of a key, or is not a checkpoint of this version.
    """
    payload: dict[str, Any] = read_tensors(path, mmap=mmap)
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise _OtherVersion(
            f"{path}: was written by another version of mlora; use that one, or train anew with "
            "`mlora train RUN.yaml --overwrite`"
        )
    try:
        _Payload.model_validate(payload)
    except ValidationError as error:
        raise RunError(f"{path}: is not a checkpoint of a run: {first_fault(error)}") from error
    return payload


def load_checkpoint(
    folder: Path,
    warn: Callable[[str], None],
    lacks: Callable[[Mapping[str, Any]], str | None] = lambda checkpoint: None,
) -> dict[str, Any] | None:
    """Loads the newest whole checkpoint, on the CPU; None if there are no checkpoints.

    `lacks` says what is wrong with another file that a checkpoint counts on. `warn` is told of each
    checkpoint that is left out. RunError if none is whole, or if the newest readable file is not a checkpoint
    of this version.
    """
    faults: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        if faults:
            warn(f"{faults[-1]}; trying the one before")
        try:
            payload = read_checkpoint(path, mmap=False)
        except _OtherVersion:
            raise
        except RunError as error:
            faults.append(str(error))
            continue
        if (lacking := lacks(payload)) is None:
            return payload
        faults.append(f"{path}: {lacking}")
    if faults:
        raise RunError(
            f"{faults[-1]}; no checkpoint is whole; put the file back, or train anew with `mlora train "
            "RUN.yaml --overwrite`"
        )
    return None
