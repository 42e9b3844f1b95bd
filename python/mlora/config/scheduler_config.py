"""What may stand under ``scheduler`` in a run's config."""

from __future__ import annotations

import math
import re
import sys
from typing import Any, Literal

from pydantic import field_validator

from mlora.config.strict import Strict


class SchedulerConfig(Strict):
    """Which tasks run at once: as many as the memory holds; without a limit, all of them.

    ``memory_limit`` is what a stage's process may have resident on a CPU, and its allocator hold on a GPU.
    ``policy`` says who comes first: ``fcfs`` (higher priorities, then who came first) or
    ``shortest_first`` (higher priorities, then the least work left). ``placement`` says who shares a slot
    of a pipeline: ``token_balanced`` or ``in_order``.
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
    """Return a size in bytes.

    Args:
        value: bytes, or a number with a unit: ``8GiB``, ``500 MB``, ``2G``.

    Returns:
        Bytes, rounded down; at least 1.

    Raises:
        ValueError: the value is not a size, or less than a byte.
    """
    size = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?)B?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, str) and match is not None:
        power = " KMGT".index(match[2].upper() or " ")
        size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not 1 <= size <= sys.float_info.max:
        raise ValueError(f"must be a size such as 8GiB or 500MB, got {value!r}")
    return math.floor(size)
