"""The benchmark of the scheduler runs, and its arithmetic is right; no time and no error is judged."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mlora.memory.estimate import MemoryEstimate


@pytest.fixture
def timers(bench_folder: Path) -> ModuleType:
    return import_module("scheduler.run")


@pytest.fixture
def prediction(bench_folder: Path) -> ModuleType:
    return import_module("scheduler.prediction")


@pytest.fixture
def report(bench_folder: Path) -> ModuleType:
    return import_module("scheduler.command")


@pytest.mark.nightly
def test_both_parts_run(bench_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, bench_folder / "__main__.py", "scheduler", "--quick", "--threads", "1"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "scheduler"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"scheduler.json", "scheduler.png", "scheduler.txt"}
    data = json.loads((tmp_path / "scheduler.json").read_text())
    assert data["machine"]["command"].startswith("python ")
    for scene in ("all_fit", "some_wait"):
        found = data["overhead"][scene]
        assert found["steps"] == 6
        assert found["decisions"] >= 2
        assert found["tasks_of_a_step"] in (1, 2)
        assert all(share >= 0 for name, share in found["shares"].items() if name != "measuring")
        assert min(found["seconds"][name] for name in ("asked", "next_batch", "passed")) > 0
        assert found["decision_seconds"] > found["decision_parts"]["write_entry"] > 0
    assert data["overhead"]["all_fit"]["learning_steps_measured"][:10] == [True] * 10
    assert max(data["overhead"]["some_wait"]["admitted"]) <= 2
    curves = data["prediction"]["curves"]
    assert len(curves) == 4
    for curve in curves:
        assert [value is None for value in curve["ways"]["seeded"]["mape"]] == [False] * 5
        assert [value is None for value in curve["ways"]["paper"]["mape"]] == [True, *[False] * 4]
        assert curve["seed_worst"] >= 0
    assert {line["what"] for line in data["must"]} >= {"share of a step, %, all tasks fit"}
    assert "hidden 64, recomputed" in done.stdout


class Work:
    """Moves a clock on."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.now = 0.0
        self.seconds = iter(seconds)

    def clock(self) -> float:
        return self.now

    def do(self) -> str:
        self.now += next(self.seconds)
        return "done"


def test_calls_are_counted_by_iteration(timers: ModuleType) -> None:
    work, other = Work([1.0, 2.0, 4.0, 8.0, 16.0]), Work([1.0])
    watch = timers.Stopwatch(work.clock)
    watch.time(work, "do")
    work.do()  # outside of an iteration
    watch.begin()
    assert work.do() == "done"
    work.do()
    work.now += 100.0
    watch.begin()
    work.do()
    watch.end()
    work.do()
    watch.end()
    assert [one.calls for one in watch.iterations] == [{"do": 6.0}, {"do": 8.0}]
    assert [one.seconds for one in watch.iterations] == [106.0, 8.0]
    assert other.do() == "done"
    assert other.now == 1.0


def steps(timers: ModuleType, seconds: Sequence[float], **calls: float) -> Iterator[Any]:
    for begin, value in zip(accumulate(seconds, initial=0.0), seconds, strict=False):
        yield timers.Iteration(begin, value, rows=10, tasks=2, calls=dict(calls))


def test_the_overhead_is_a_sum_of_its_pieces(timers: ModuleType) -> None:
    calls = {"asked": 0.001, "next_batch": 0.004, "passed": 0.002}
    iterations = list(steps(timers, [1.0, 2.0, 3.0], **calls))
    iterations[0].calls["show"] = 0.03
    iterations[1].measured = True
    iterations += [
        timers.Iteration(9.0, 0.5, calls={"decide": 0.3, "write_entry": 0.1, "write_summary": 0.2}),
        timers.Iteration(10.0, 0.1),
    ]
    found = timers.overhead(iterations, measuring=0.64)
    assert (found["steps"], found["step_seconds"]) == (2, 2.0)
    assert found["seconds"]["show"] == pytest.approx(0.015)
    assert found["decision_seconds"] == pytest.approx(0.5)
    each = 0.007 + 0.015 + 0.5 / timers.DECISIONS_EVERY
    assert found["share"] == pytest.approx(each / 2.0 + 0.64 / timers.MEASURED_EVERY)
    assert sum(found["shares"].values()) == pytest.approx(found["share"])
    iterations.append(timers.Iteration(11.0, 0.5, calls={"decide": 0.3, "write_summary": 0.2}))
    iterations += steps(timers, [2.0], asked=0.001, next_batch=0.054, passed=0.002)
    found = timers.overhead(iterations, measuring=0.0)
    assert found["seconds"]["next_batch"] == pytest.approx(0.004 + 0.05 / timers.DECISIONS_EVERY)
    with pytest.raises(ValueError, match="expected steps and decisions, got 3 and 0"):
        timers.overhead(list(steps(timers, [1.0, 1.0, 1.0])), 0.0)


def test_how_often_is_measured_is_the_librarys(timers: ModuleType) -> None:
    from mlora.memory import estimate

    assert timers.MEASURED_EVERY == estimate._EVERY


def test_ratios_are_of_the_same_steps(timers: ModuleType) -> None:
    turns = {
        "a": [list(steps(timers, [2.0, 4.0])), list(steps(timers, [9.0]))],
        "b": [list(steps(timers, [1.0, 2.0])), list(steps(timers, [3.0]))],
    }
    turns["a"][0].insert(1, timers.Iteration(0.0, 7.0, calls={"decide": 1.0}))
    assert timers.ratios(turns, "a", "b") == {"median": 2.0, "spread": pytest.approx(0.5), "steps": 3}
    turns["b"][1][0].rows = 11
    with pytest.raises(ValueError, match="expected steps of the same rows, got 10 and 11"):
        timers.ratios(turns, "a", "b")


def truth(lengths: Sequence[int]) -> int:
    return 1000 + 30 * sum(lengths) + 2 * sum(n * n for n in lengths)


def points(shapes: Sequence[Sequence[int]]) -> list[tuple[dict[str, list[int]], tuple[int, ...]]]:
    return [({"a": list(shape)}, (truth(shape), truth(shape) // 2)) for shape in shapes]


LEARNED = points([[10], [40, 7], [25, 25, 3], [60], [9, 31]])
TESTS = points([[33], [12, 50], [5, 5]])


def test_errors_fall_with_points(prediction: ModuleType) -> None:
    found = prediction.curves(prediction.by_peak, LEARNED, TESTS, orders=3)
    assert found["mape"][0] is None
    assert len(found["mape"]) == len(found["worst_mape"]) == 6
    assert all(w >= m > 0 for m, w in zip(found["mape"][1:3], found["worst_mape"][1:3], strict=True))
    assert found["worst_mape"][-1] < 0.1
    phases = prediction.curves(lambda: prediction.by_phases([None, None]), LEARNED, TESTS, orders=3)
    assert phases["worst_mape"][-1] < 0.1
    assert prediction.curves(prediction.by_peak, LEARNED, [], orders=2)["mape"] == [None] * 6
    assert prediction.is_equal(TESTS[2])
    assert not prediction.is_equal(TESTS[1])


def test_each_order_begins_with_the_seeds(prediction: ModuleType) -> None:
    seeds = [(list(shape["a"]), [phases]) for shape, phases in LEARNED]
    doubled = [(lengths, [(2 * first, second)]) for lengths, [(first, second)] in seeds]

    estimate = MemoryEstimate(lambda names: "all", lambda names: doubled, [[None, 64]])
    estimate.predict({"a": [3]}, ["a"])
    seeded = estimate.state()
    assert prediction.knees_of(seeded) == [None, 64]
    found = prediction.curves(lambda: prediction.by_estimate(estimate, seeded, ["a"]), LEARNED, TESTS, 3)
    assert found["mape"][0] == found["worst_mape"][0] == pytest.approx(100, rel=0.01)
    assert found["worst_mape"][-1] < 1.0


def curve(name: str, after: float, seed: float, window: int | None = None) -> dict[str, Any]:
    row = [seed, after, after]
    ways = {way: {"mape": row, "worst_mape": row} for way in ("seeded", "unseeded", "paper")}
    ways["paper"] = {"mape": [None, 40.0, after], "worst_mape": [None, 40.0, after]}
    return {
        "name": name,
        "checkpointing": False,
        "window": window,
        "megabytes": [1.0, 2.0],
        "seed_worst": seed,
        "ways": ways,
        "seeded_equal": {"mape": row, "worst_mape": row},
    }


@pytest.fixture
def result() -> Mapping[str, Any]:
    curves = [curve("good", 0.1, 1.0), curve("bad", 0.3, 2.5), curve("windowed", 9.0, 9.0, window=8)]
    part = {"points": 2, "judged_at": 1, "must_mape": 0.25, "must_seed": 2.0, "curves": curves}
    machine = {"processor": "one", "torch": "2", "commit": "c0ffee"}
    return {"machine": machine, "quick": False, "prediction": part}


def test_what_is_met_and_missed(report: ModuleType, result: Mapping[str, Any]) -> None:
    lines = report.must_lines(result)
    assert [(line.value, line.met) for line in lines] == [
        (0.1, True),
        (1.0, True),
        (0.3, False),
        (2.5, False),
    ]
    assert lines[2].what == "MAPE after 1 points, %, bad, kept"
    assert [len(panel.series) for panel in report.panels(result["prediction"])] == [3, 3, 3]
