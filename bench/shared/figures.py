"""Figures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure(
    path: Path, rows: int = 1, columns: int = 1, *, dpi: int, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Makes a figure of `rows` times `columns` panels, and saves it when all is drawn.

    Args:
        path: of the PNG.
        rows, columns: of panels.
        dpi: dots per inch.
        options: of `matplotlib.pyplot.subplots`.

    Yields:
        The figure and its axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(rows, columns, **options)
    try:
        yield made, axes
        made.savefig(path, dpi=dpi)
    finally:
        plt.close(made)


def about(machine: Mapping[str, Any], *, quick: bool, processor: str = "processor") -> str:
    """Returns a figure's title: where it was measured, with which torch, at which commit.

    Args:
        machine: as `machine.describe` gives it.
        quick: whether the sizes were tiny.
        processor: `gpu` where that is what was measured.
    """
    tiny = ", --quick: sizes that show nothing" if quick else ""
    return f"{machine.get(processor)}, torch {machine['torch']}, commit {machine['commit']}{tiny}"
