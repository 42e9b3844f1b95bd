"""``samples.jsonl``: a few held-out prompts of each adapter, and what the model answered at an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from mlora.durable import sync, sync_path
from mlora.errors import RunError, first_fault
from mlora.regular_files import open_regular
from mlora.store.disk import open_appended, os_errors


class _Sample(BaseModel):
    """A prompt, the answer that was wanted, the one that was given, and whether they are equal."""

    prompt: str
    expected: str
    answer: str
    exact: bool


class _SampleLine(BaseModel):
    """An evaluation of an adapter after `step` optimizer steps."""

    adapter: str
    step: int
    samples: list[_Sample]


def append_samples(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Appends one object as a line for each evaluation of an adapter, durably; the file may be missing."""
    lines = b"".join((json.dumps(record) + "\n").encode() for record in records)
    with os_errors(f"{path}: cannot be written"):
        new = not path.exists()
        with open_appended(path) as file:
            file.write(lines)
            sync(file.fileno())
        if new:
            sync_path(path.parent)


def samples_size(path: Path) -> int:
    """Returns the bytes of the lines so far."""
    return path.stat().st_size if path.exists() else 0


def cut_samples(path: Path, size: int) -> None:
    """Keeps only the first `size` bytes, which a checkpoint has seen. A file that is gone is no fault."""
    with os_errors(f"{path}: cannot be written"):
        if samples_size(path) > size:
            with open_appended(path) as file:
                file.truncate(size)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Reads ``samples.jsonl``, which may be missing, without an incomplete last line."""
    with os_errors(f"{path}: cannot be read"):
        try:
            with open_regular(path) as file:
                content = file.read()
        except FileNotFoundError:
            content = b""
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            records.append(_SampleLine.model_validate_json(line).model_dump())
        except ValidationError as error:
            raise RunError(f"{path}:{number}: is not a line of samples: {first_fault(error)}") from error
    return records
