"""The benchmark of one layer judges plain weights, its loop without dropout, and whether it was alone."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


def row(ours: float, must: float | None, processors: float, loop: float = 2.0) -> dict[str, Any]:
    return {
        "shape": (512, 1024, 1024, 8),
        "dtype": "float32",
        "must": must,
        "ratio_to_frozen": {"peft": 3.0, "ours": ours, "ours_held": ours, "addmm_without_dropout": loop},
        "processors": {"peft": 1.1, "ours": processors},
    }


@pytest.mark.parametrize(
    ("rows", "missed"),
    [
        ([row(1.1, 1.12, 1.95), row(1.9, None, 1.9)], []),
        ([row(1.1, 1.12, 1.95), row(1.2, 1.12, 1.9)], ["512x1024x1024x8 float32: ours / frozen"]),
        ([row(1.1, 1.12, 1.7)], ["processor time / wall time, worst case; below it SOMETHING ELSE RAN"]),
        (
            [row(1.1, None, 2.0, loop=1.0)],
            ["512x1024x1024x8 float32: ours or held / the loop of addmm_ without dropout"],
        ),
    ],
)
def test_what_is_missed(bench_folder: Path, rows: list[dict[str, Any]], missed: list[str]) -> None:
    found = import_module("linear.command").targets(rows, threads=2)
    assert [target.what for target in found if not target.met] == missed
