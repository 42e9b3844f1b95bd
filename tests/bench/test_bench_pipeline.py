"""The benchmark of pipelines runs, and its numbers have the form that they must have; no time is judged."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
PEERS = {
    "torch GPipe N=4",
    "torch 1F1B N=4",
    "torch 1F1B N=4, joint",
    "FSDP2 N=4",
    "TP N=4",
    "TP by hand N=4",
}


@pytest.fixture
def places(bench_folder: Path) -> ModuleType:
    return import_module("pipeline_places")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of all sections."""
    folder = tmp_path_factory.mktemp("pipeline")
    command = [sys.executable, BENCH / "bench_pipeline.py", "--quick", "--out", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {"pipeline.json", "pipeline.txt", "pipeline.png"}
    assert (folder / "pipeline.txt").read_text() in done.stdout
    return folder


@pytest.fixture
def data(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "pipeline.json").read_text())
    assert found["machine"]["command"].startswith("python ")
    return found


def place_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(place for place in data["places"] if place["name"] == name)
    return found


def check_rows(place: dict[str, Any]) -> None:
    assert set(place["rows"]) == {case["name"] for case in place["cases"]}
    for case in place["cases"]:
        row = place["rows"][case["name"]]
        assert row["tokens_per_second"] > 0
        assert 0 < row["mean_completion_seconds"] <= row["seconds"]
        assert 0 <= row["other_processes_share"] <= 1
        if row["bubble"] is not None:
            assert 0 <= row["bubble"] < 1
        if case["way"] == "ours":
            assert row["simulated_bubble"] is None or 0 <= row["simulated_bubble"] < 1
            assert all(min(stage["forward"], stage["backward"]) > 0 for stage in row["times"]["stages"])
        assert (row["delay"] > 0) == (case["delay"] > 0)


def lines(data: dict[str, Any], section: str, word: str = "") -> dict[str, float]:
    found = [line for line in data["lines"] if line["section"] == section]
    return {line["what"]: line["value"] for line in found if word in line["what"]}


def test_stages_that_compute(data: dict[str, Any]) -> None:
    place = place_of(data, "real")
    check_rows(place)
    assert place["losses_differ_by"] < 1e-4
    assert set(place["rows"]) >= PEERS
    ratios = lines(data, "throughput")
    assert ratios["lorapp / gpipe"] > 0
    assert ratios["lorapp N=4 / torch 1F1B N=4"] > 0
    # 4 KiB of activations, beside which headers, ids and prefixes are a few percent
    volumes = lines(data, "volume", "real")
    assert len(volumes) == 4
    assert all(1 < value < 1.2 for value in volumes.values())
    assert len(lines(data, "tasks")) == 8


def test_stages_that_sleep(out: Path, data: dict[str, Any]) -> None:
    place = place_of(data, "sleep D=3")
    check_rows(place)
    assert place["stages"] == 3
    assert "SLEEP KERNELS" in (out / "pipeline.txt").read_text()
    sleeping = [line for line in data["lines"] if line.get("place") == "sleep D=3" and "measured" in line]
    names = {line["what"].split(", ")[1].split(":")[0] for line in sleeping}
    assert names == {"lorapp L=3", "lorapp L=4", "lorapp L=6", "gpipe N=3", "1f1b N=3"}
    assert len(lines(data, "overlap")) == 4


def test_between_namespaces(data: dict[str, Any]) -> None:
    if data["not_run"]:
        pytest.skip(data["not_run"]["network"])
    place = place_of(data, "network")
    check_rows(place)
    assert place["rate"] == "1gbit"
    ports, interface = (
        lines(data, "volume", "network, bytes sent"),
        lines(data, "volume", "network, bytes on"),
    )
    assert len(ports) == len(interface) == 4
    # what the ports count has really left, in frames with headers of their own
    for count, sent in zip(ports.values(), interface.values(), strict=True):
        assert 1 < count < sent
    links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    assert "mlora0" not in links, "nothing is left behind"


def test_namespaces_need_root(bench_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = import_module("pipeline_start")
    monkeypatch.setattr(start.os, "geteuid", lambda: 1000)
    assert start.why_no_network() == "network namespaces need root"
    monkeypatch.setattr(start.os, "geteuid", lambda: 0)
    monkeypatch.setattr(start.shutil, "which", lambda tool: None)
    assert start.why_no_network().startswith("not installed: ip, tc")


def test_refuses_an_unknown_section() -> None:
    command = [sys.executable, BENCH / "bench_pipeline.py", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "sections: expected some of throughput, network, volume, bubbles, overlap, tasks" in done.stderr


def test_as_many_tokens_per_step_for_all(places: ModuleType) -> None:
    cases = places.throughput_cases(2, everything=True, quick=False)
    assert {case.adapters for case in cases} == {4}
    assert {case.micro_batches for case in cases} == {1, 4}
    for case in cases:
        assert ("N=4" in case.name) == (case.micro_batches == 4)


def test_bytes_are_those_of_the_activations(places: ModuleType) -> None:
    assert places.REAL.message_bytes == 128 * 512 * 4
    sections = import_module("pipeline_sections")
    names = ("lorapp", "gpipe", "lorapp N=4", "1f1b N=4")
    rows = {name: {"bytes_per_micro_batch": 528_000} for name in names}
    place = places.Place("real", 2, [], 1, shape=places.REAL)
    found = sections.volume(rows, place)
    assert all(line["value"] == pytest.approx(528_000 / 524_288) for line in found)
