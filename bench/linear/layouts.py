"""How the rows of a batch are spread over its adapters, and which ranks these have."""

from __future__ import annotations

from collections.abc import Callable

RANKS = (8, 16, 32, 64)


def balanced(rows: int, adapters: int) -> list[int]:
    """Rows of each adapter, as equal as they can be.

    Raises:
        ValueError: if there are fewer rows than adapters.
    """
    _check(rows, adapters)
    return [rows // adapters + (index < rows % adapters) for index in range(adapters)]


def skewed(rows: int, adapters: int) -> list[int]:
    """Rows of each adapter in proportion to 1, 1/2, 1/3, ... (Zipf), at least one each, the longest first.

    Raises:
        ValueError: if there are fewer rows than adapters.
    """
    _check(rows, adapters)
    total = sum(1 / (index + 1) for index in range(adapters))
    lengths = [1 + int((rows - adapters) / (index + 1) / total) for index in range(adapters)]
    lengths[0] += rows - sum(lengths)
    return lengths


def mixed_ranks(adapters: int) -> list[int]:
    """Ranks 8, 16, 32, 64, 8, ..."""
    return [RANKS[index % len(RANKS)] for index in range(adapters)]


def _check(rows: int, adapters: int) -> None:
    if rows < adapters:
        raise ValueError(f"rows: expected at least one for each of {adapters} adapters, got {rows}")


LAYOUTS: dict[str, Callable[[int, int], list[int]]] = {"balanced": balanced, "skewed": skewed}
