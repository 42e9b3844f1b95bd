"""The model of ``scheduler`` in a run's config."""

from __future__ import annotations

import math
import re
import sys
from typing import Any, Literal

from pydantic import field_validator

from mlora.config.strict import Strict


class SchedulerConfig(Strict):
    """Which tasks run at once: as many as fit in memory; without a limit, all of them.

    ``memory_limit`` bounds the resident memory of a stage's process on a CPU, and what its allocator holds
    on a GPU. ``policy`` is the order of admission: ``fcfs`` (higher priority, then earlier arrival) or
    ``shortest_first`` (higher priority, then least work left). ``placement`` chooses which tasks share
    a slot of a pipeline: ``token_balanced`` or ``in_order``.
    """

    memory_limit: int | str | None = None
    policy: Literal["fcfs", "shortest_first"] = "fcfs"
    placement: Literal["token_balanced", "in_order"] = "token_balanced"

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _limit(cls, value: Any) -> Any:
        if value is None:
            return None
        size = parse_size(value)
        return size if isinstance(value, float) else value

    @property
    def limit_bytes(self) -> int | None:
        """``memory_limit`` in bytes."""
        return None if self.memory_limit is None else parse_size(self.memory_limit)


def parse_size(value: Any) -> int:
    """Returns a size in bytes, rounded down, from a number or a text such as ``8GiB``, ``500 MB``, ``2G``."""
    size = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?)B?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, str) and match is not None:
        power = " KMGT".index(match[2].upper() or " ")
        size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not 1 <= size <= sys.float_info.max:
        raise ValueError(f"must be a size such as 8GiB or 500MB, got {value!r}")
    return math.floor(size)
