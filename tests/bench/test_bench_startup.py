"""The start-up benchmark: its figures from given times, and its limits."""

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def startup(bench_folder: Path) -> ModuleType:
    return import_module("training.startup")


def times(help_: float, ours: list[float]) -> dict[str, list[tuple[float, float]]]:
    """Three turns: (wall, processor) of each command; processors are idle half of the time."""
    walls = {"python": [0.02] * 3, "mlora --help": [help_] * 3, "import torch": [1.0, 2.0, 4.0]}
    return {
        name: [(wall, wall / 2) for wall in each]
        for name, each in {**walls, "import mlora_ext": ours}.items()
    }


def test_differences_and_ratios_are_those_of_one_turn(startup: ModuleType) -> None:
    rows = startup.summary(times(0.2, [1.5, 2.2, 4.1]))
    assert rows["import torch"] == {"wall": 2.0, "processor": 1.0}
    # differences 0.5, 0.2, 0.1; ratios 1.5, 1.1, 1.025
    assert rows["added"] == pytest.approx({"wall": 0.2, "processor": 0.1})
    assert rows["ratio"] == pytest.approx({"wall": 1.1, "processor": 1.1})


@pytest.mark.parametrize(
    ("help_", "ours", "missed"),
    [
        (0.2, [1.1, 2.1, 4.1], []),
        (0.4, [1.1, 2.1, 4.1], ["mlora --help"]),
        (0.2, [1.3, 2.3, 4.3], ["import mlora_ext"]),
    ],
)
def test_what_misses_its_limit_is_named(
    help_: float,
    ours: list[float],
    missed: list[str],
    startup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "times_of", lambda turns: times(help_, ours))
    found = startup.measure(argparse.Namespace(turns=3))
    assert [target.what for target in found.must if not target.met] == missed
