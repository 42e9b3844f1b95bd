"""The forecast for many devices: its results are what the script makes, and its counts hold."""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def scale(bench_folder: Path) -> ModuleType:
    return import_module("forecast.command")


@pytest.fixture
def model(bench_folder: Path) -> ModuleType:
    return import_module("forecast.command")


def test_the_results_are_those_of_the_script(scale: ModuleType, bench_folder: Path) -> None:
    data = json.loads((bench_folder / "results" / "scale.json").read_text())
    assert data["simulated"]
    shallow = [row for row in data["pipelines"] if row["stages"] <= 4]
    assert len(shallow) == 12
    for row in shallow:
        trained = next(each for each in scale.TRAINED if each.name == row["model"])
        again = scale.pipeline_row(trained, row["stages"], row["network"], scale.NETWORKS[row["network"]])
        assert again.keys() == row.keys()
        for name, value in row.items():
            assert again[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
    assert scale.layout_rows(data["pipelines"]) == data["layouts"]
    assert {row["devices"] for row in data["layouts"]} == {8, 64, 512}


def test_nothing_exceeds_its_bounds(bench_folder: Path) -> None:
    for row in json.loads((bench_folder / "results" / "scale.json").read_text())["pipelines"]:
        most = min(row["stage_bound"], row["link_bound"])
        assert 0.985 * most < row["efficiency"] < 1.001 * most
        # the begin of a run, in which fast stages work ahead, is a part of it
        assert row["efficiency_with_D_adapters"] < 1.001 * most
        assert row["efficiency_with_2D_adapters"] < 1.003 * most
        assert row["memory_gb"] < 80


def test_a_model_is_cut_as_evenly_as_its_head_allows(model: ModuleType) -> None:
    small, large = model.TRAINED
    assert small.block_parameters == 202_375_168
    assert small.cut(8) == [4] * 8
    assert large.cut(8) == [11, *[10] * 6, 9]
    assert sum(large.cut(64)) == 80
    stages = large.stages(8)
    whole = 80 * large.block_seconds + large.head_seconds
    assert sum(stage.forward for stage in stages) == pytest.approx(whole)


def test_memory_is_that_of_the_fullest_stage(model: ModuleType) -> None:
    small = model.TRAINED[0]
    per_token = 2 * (6 * 4096 + 2 * 4096 + 4 * 11008)
    assert small.kept_bytes == 4096 * per_token
    one = small.memory(8, [1] * 8, 0)
    assert small.memory(8, [2, *[1] * 7], 0) - one == pytest.approx(4 * small.kept_bytes, rel=0.01)
    assert small.memory(8, [1] * 8, 1) - one == 4 * small.adapter_bytes
