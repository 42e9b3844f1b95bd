"""The benchmark of pipelines runs, and its numbers have the form that they must have; no time is judged."""

import itertools
import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlora.simulate.timeline import Event, Timeline

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
    return import_module("pipeline.places")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of all sections."""
    folder = tmp_path_factory.mktemp("pipeline")
    command = [sys.executable, BENCH / "__main__.py", "pipeline", "--quick", "--out", folder / "pipeline"]
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


@pytest.mark.nightly
def test_stages_that_compute(data: dict[str, Any]) -> None:
    place = place_of(data, "real")
    check_rows(place)
    assert place["losses_differ_by"] < 1e-5
    assert set(place["rows"]) >= PEERS
    ratios = lines(data, "throughput")
    assert ratios["lorapp / gpipe"] > 0
    assert ratios["lorapp N=4 / torch 1F1B N=4"] > 0
    # a message is a head of 2 KiB and 4 KiB of activations; credit and ids are a few percent more
    volumes = lines(data, "volume", "real")
    assert len(volumes) == 4
    assert all(1.5 < value < 1.6 for value in volumes.values())
    tasks = place_of(data, "tasks")
    check_rows(tasks)
    assert tasks["losses_differ_by"] < 1e-5
    assert len(lines(data, "tasks")) == 8


@pytest.mark.nightly
def test_stages_that_sleep(out: Path, data: dict[str, Any]) -> None:
    place = place_of(data, "sleep D=3")
    check_rows(place)
    assert place["stages"] == 3
    assert "SLEEP KERNELS" in (out / "pipeline.txt").read_text()
    compared = lines(data, "bubbles", "bubble measured - simulated")
    sleeping = [what.removeprefix("sleep D=3, ") for what in compared if what.startswith("sleep D=3, ")]
    names = {what.split(":")[0] for what in sleeping}
    assert names == set(place["rows"]), "every row that has a bubble is compared with the simulator"
    assert len(lines(data, "overlap", "sleep D=3")) == 2


@pytest.mark.nightly
def test_delays_beside_none(data: dict[str, Any]) -> None:
    check_rows(place_of(data, "overlap"))
    found = {line["what"]: line for line in data["lines"] if line["section"] == "overlap"}
    for share in (0.5, 0.9):
        plain = found[f"overlap, delay {share} T_f injected: steady throughput / without"]
        assert (plain["must"], plain["error"]) == (None, None), "one turn has no error"
        assert found[f"{plain['what']}, over the slowest stage's"]["must"] == 0.97


@pytest.mark.nightly
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
    compared = [line for line in data["lines"] if line.get("place") == "network" and "sim" in line["what"]]
    assert compared, "the simulator is compared here, too"
    assert all(line["must"] is None and "between" not in line for line in compared)


def test_namespaces_need_root(bench_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = import_module("pipeline.start")
    monkeypatch.setattr(start.os, "geteuid", lambda: 1000)
    assert start.why_no_network() == "network namespaces need root"
    monkeypatch.setattr(start.os, "geteuid", lambda: 0)
    monkeypatch.setattr(start.shutil, "which", lambda tool: None)
    assert start.why_no_network().startswith("not installed: ip, tc")


def report(path: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, BENCH / "__main__.py", "pipeline", "--from", path, "--out", out / "pipeline"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.nightly
def test_a_kept_result_is_reported_again(out: Path, data: dict[str, Any], tmp_path: Path) -> None:
    """What misses is marked, and fails."""
    done = report(out / "pipeline.json", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again" / "pipeline.txt").read_text() == (out / "pipeline.txt").read_text()
    done = report(tmp_path / "none.json", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "none.json" in done.stderr
    place = place_of(data, "sleep D=3")
    for row in place["rows"].values():
        row["each"]["bubble"] = [0.5]
    (tmp_path / "pipeline.json").write_text(
        json.dumps(data | {"quick": False, "sections": ["bubbles"], "places": [place]})
    )
    done = report(tmp_path / "pipeline.json", tmp_path)
    assert done.returncode == 1
    assert "missed: sleep D=3, lorapp L=3: bubble measured - simulated" in done.stderr
    marked = [line for line in done.stdout.splitlines() if line.startswith("MISSED")]
    assert any("lorapp L=3: bubble" in line for line in marked)


def misses(lines: list[dict[str, Any]]) -> list[str]:
    return [one.what for one in import_module("pipeline.results").targets(lines) if not one.met]


def losses(*values: float) -> list[dict[str, Any]]:
    """What one process told of steps 0, 1, ... of one adapter."""
    return [{"losses": [((0, step, 0), value) for step, value in enumerate(values)]}]


def test_losses_behind_an_update_are_compared(bench_folder: Path) -> None:
    measures = import_module("pipeline.measures")
    case = import_module("pipeline.places").Case("a", "ours")

    def worst(*turns: Any) -> float:
        return float(measures.worst_difference([(case, turn) for turn in turns]))

    assert worst(losses(4.0, 3.0), losses(4.0, 3.0)) == 0.0
    assert worst(losses(4.0, 3.0), losses(4.0, 3.3)) == pytest.approx(0.1)
    assert worst(losses(4.0, 3.0), losses(4.0, math.nan)) == math.inf
    with pytest.raises(ValueError, match="a: told no losses behind an update"):
        worst(losses(4.0), losses(4.0))


def test_simulated_with_as_many_adapters_as_run_at_once(bench_folder: Path) -> None:
    measures, case = import_module("pipeline.measures"), import_module("pipeline.places").Case
    stage = {"forward": 9.0, "backward": 9.0, "optimizer": 0.0}
    times = {"stages": [stage] * 4, "links_forward": [0.0] * 3, "links_backward": [0.0] * 3}

    def bubble(adapters: int, at_once: int | None) -> float:
        chosen = case("", "ours", "lorapp", adapters, steps=6, tasks=True, at_once=at_once)
        # what each micro-batch took counts, whenever that was, and not what the stages take otherwise
        keys = itertools.product(range(4), "FB", range(adapters), range(6))
        ran = Timeline.of(Event(*key, 0, begin, begin + 1.0) for begin, key in enumerate(keys))
        return float(measures.simulated_bubble(chosen, ran, times, 0.0))

    assert bubble(4, None) < 0.01
    assert bubble(4, 2) == bubble(2, None) == pytest.approx(0.5)


def test_as_many_tokens_per_step_for_all(places: ModuleType) -> None:
    cases = places.throughput_cases(2, everything=True, quick=False)
    assert {case.adapters for case in cases} == {4}
    assert {case.micro_batches for case in cases} == {1, 4}
    for case in cases:
        assert ("N=4" in case.name) == (case.micro_batches == 4)
        assert case.steps * case.micro_batches == 8


@pytest.mark.parametrize(("name", "judged"), [("real", True), ("tasks", False), ("network", False)])
def test_which_bubbles_are_judged(places: ModuleType, name: str, judged: bool) -> None:
    case = import_module("pipeline.places").Case("lorapp", "ours", "lorapp", adapters=4)
    place = places.Place(name, 2, [case], 1, places.REAL, network=name == "network")
    row = {"each": {"bubble": [0.1, 0.5, 0.6], "simulated_bubble": [0.1, 0.1, 0.1]}, "of_slowest_stage": 0.5}
    found = import_module("pipeline.results").bubbles({"lorapp": row}, place)
    assert [line["value"] for line in found] == [pytest.approx(0.4), 2.0]
    assert found[0]["worst"] == pytest.approx(0.5)
    assert misses(found) == [line["what"] for line in found] * judged


def test_what_must_be_and_did_not_run_is_missed(bench_folder: Path) -> None:
    ratio = import_module("pipeline.results").ratio
    assert ratio({}, "lorapp", "gpipe", None) == []
    (line,) = ratio({}, "lorapp", "gpipe", 1.7)
    assert misses([line]) == [line["what"]]


def test_bytes_are_those_of_the_activations(places: ModuleType) -> None:
    assert places.REAL.message_bytes == 128 * 512 * 4
    sections = import_module("pipeline.results")
    names = ("lorapp", "gpipe", "lorapp N=4", "1f1b N=4")
    rows = {name: {"bytes_per_micro_batch": 528_000} for name in names}
    place = places.Place("real", 2, [], 1, shape=places.REAL)
    found = sections.volume(rows, place)
    assert all(line["value"] == pytest.approx(528_000 / 524_288) for line in found)
    assert not misses(found)
    few = {name: {"bytes_per_micro_batch": 500_000} for name in names}
    assert len(misses(sections.volume(few, place))) == 4
