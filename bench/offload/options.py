"""What every part of the benchmark is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TURNS, QUICK_TURNS = 5, 1


@dataclass(frozen=True)
class Options:
    """How a part runs.

    Attributes:
        folder: an empty folder on a disk, for models and files.
        quick: tiny sizes, to see that it runs.
        turns: of each contender.
        threads: that compute, at most.
        deepspeed: an interpreter that has DeepSpeed; None = there is none.
    """

    folder: Path
    quick: bool = False
    turns: int = TURNS
    threads: int = 1
    deepspeed: str | None = None
