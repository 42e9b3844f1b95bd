"""Chooses the faster GPU backend for a shape from measurements, one table per architecture.

`choices.json` beside this file holds the measurements; `mlora bench choose` makes and prints it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

Choice = Literal["triton", "cuda"]
UNMEASURED: Choice = "triton"
PATH = Path(__file__).parent / "choices.json"


@dataclass(frozen=True)
class MeasuredShape:
    """Times of forward and backward of one layer by both backends.

    Attributes:
        dtype: of x, such as `bfloat16`.
        rank: the largest of the adapters.
        triton_seconds, cuda_seconds: medians of one run.
    """

    dtype: str
    d_in: int
    d_out: int
    rank: int
    rows: int
    triton_seconds: float
    cuda_seconds: float

    @property
    def winner(self) -> Choice:
        """The faster backend; triton if both are equal."""
        return "cuda" if self.cuda_seconds < self.triton_seconds else "triton"


Table = Mapping[str, Sequence[MeasuredShape]]


def faster_backend(architecture: str, dtype: str, d_in: int, d_out: int, rank: int, rows: int) -> Choice:
    """Returns the faster backend on the most similar measured shape, such as `triton`.

    Most similar is the shape of the same dtype (such as `bfloat16`) that is nearest in `(log d_in, log d_out,
    log rank, log rows)`, Euclidean; ties go to the first in the table. If nothing was measured for the
    architecture (such as `sm_90`) and dtype, returns `triton`. A size below 1 raises ValueError.
    """
    return nearest(packaged().get(architecture, ()), dtype, d_in, d_out, rank, rows)


def nearest(
    entries: Sequence[MeasuredShape], dtype: str, d_in: int, d_out: int, rank: int, rows: int
) -> Choice:
    """As `faster_backend`, from the entries of one architecture."""
    wanted = {"d_in": d_in, "d_out": d_out, "rank": rank, "rows": rows}
    for name, size in wanted.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    known = [entry for entry in entries if entry.dtype == dtype]
    if not known:
        return UNMEASURED

    def distance(entry: MeasuredShape) -> float:
        return sum(math.log(getattr(entry, name) / size) ** 2 for name, size in wanted.items())

    return min(known, key=distance).winner


@lru_cache(maxsize=1)
def packaged() -> Table:
    """Returns the package's table, read once."""
    return load(PATH)


def load(path: Path) -> Table:
    """Reads and checks a JSON table; ValueError names the file, the entry, what was expected and what came.

    Format: `{"format": 1, "architectures": {"sm_90": {"measured": {...}, "entries": [...]}}}`. `measured`
    says with what it was measured; an entry has the fields of `MeasuredShape`.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: expected JSON, got: {error.msg}") from error
    if not isinstance(data, dict) or data.get("format") != 1:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path}: format: expected 1, got {got!r}")
    architectures = _of_type(path, "architectures", data.get("architectures"), dict)
    table = {}
    for name, found in architectures.items():
        entries = _of_type(path, f"{name}.entries", _of_type(path, name, found, dict).get("entries"), list)
        table[name] = [_entry(path, f"{name}.entries[{i}]", entry) for i, entry in enumerate(entries)]
    return table


def _entry(path: Path, place: str, found: Any) -> MeasuredShape:
    _of_type(path, place, found, dict)
    wanted = {field.name: field.type for field in fields(MeasuredShape)}
    if set(found) != set(wanted):
        raise ValueError(f"{path}: {place}: expected {', '.join(wanted)}, got {', '.join(found)}")
    for name, kind in wanted.items():
        value = found[name]
        if kind == "str":
            _of_type(path, f"{place}.{name}", value, str)
            continue
        numbers = (int,) if kind == "int" else (int, float)
        if isinstance(value, bool) or not isinstance(value, numbers) or not 0 < value < math.inf:
            raise ValueError(f"{path}: {place}.{name}: expected a positive {kind}, got {value!r}")
    return MeasuredShape(**found)


def _of_type(path: Path, place: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{path}: {place}: expected {kind.__name__}, got {type(value).__name__}")
    return value
