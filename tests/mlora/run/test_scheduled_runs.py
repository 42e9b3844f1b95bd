"""No task set ever exceeds its limit, in simulations whose truth is no fit's."""

import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.model import LEAST_MARGIN, PER_DOUBLING, SEEDED_MARGIN
from scheduled_runs import simulate

REST = [pytest.param(first, 120, marks=pytest.mark.nightly) for first in range(40, 1000, 120)]


@pytest.mark.parametrize(("first", "count"), [(0, 40), *REST])
def test_a_thousand_random_task_sets_stay_within_their_limits(first: int, count: int) -> None:
    outcomes = [simulate(seed) for seed in range(first, first + count)]
    assert all(outcome.ended == outcome.tasks for outcome in outcomes)
    assert max(outcome.most / outcome.limit for outcome in outcomes) <= 1.0
    assert max(outcome.past for outcome in outcomes) <= 0.0


@pytest.mark.parametrize(("first", "count"), [(2000, 4), pytest.param(2004, 4, marks=pytest.mark.nightly)])
def test_where_enough_tasks_wait_the_limit_is_used(first: int, count: int) -> None:
    outcomes = [simulate(seed, many=True) for seed in range(first, first + count)]
    assert max(outcome.most / outcome.limit for outcome in outcomes) <= 1.0
    assert all(outcome.used for outcome in outcomes)
    assert min(max(outcome.used) for outcome in outcomes) >= 0.85
    assert median(median(outcome.used) for outcome in outcomes) >= 0.85


def estimate_of(per_row: float) -> MemoryEstimate:
    shapes = [[10], [100], [40, 40], [20, 80]]
    samples = [(shape, [[int(per_row * sum(shape))]]) for shape in shapes]
    estimate = MemoryEstimate(lambda names: "+".join(sorted(set(names))), lambda _: samples)
    estimate.predict({"a": [50]}, ["a"])
    return estimate


def test_what_was_observed_counts_when_it_is_adopted() -> None:
    estimate = estimate_of(1000)
    before = estimate.activations({"a": [50]}, ["a"])
    assert before == [pytest.approx(50_000 * (1 + SEEDED_MARGIN), rel=1e-3)]
    for rows in (20, 50, 80):
        estimate.observe([rows], ["a"], [[2000 * rows]])
    assert estimate.stale
    assert estimate.activations({"a": [50]}, ["a"]) == before
    estimate.adopt()
    assert not estimate.stale
    assert estimate.predict({"a": [50]}, ["a"]) == [pytest.approx(100_000, rel=5e-3)]


def test_the_margin_falls_with_good_predictions_and_grows_with_bad_ones() -> None:
    estimate = estimate_of(1000)
    for rows in range(10, 60):
        estimate.observe([rows], ["a"], [[1000 * rows]])
    estimate.adopt()
    assert margin_of(estimate, [50]) == pytest.approx(LEAST_MARGIN)
    estimate.observe([50], ["a"], [[55_000]])
    estimate.adopt()
    assert margin_of(estimate, [50]) > 0.15


def test_the_margin_grows_beyond_what_was_measured_and_what_was_run_dry() -> None:
    estimate = estimate_of(1000)  # samples reach to 100 rows
    assert margin_of(estimate, [100]) == pytest.approx(SEEDED_MARGIN, rel=1e-3)
    growth = SEEDED_MARGIN + 3 * PER_DOUBLING
    assert margin_of(estimate, [100] * 8) == pytest.approx(growth, rel=1e-3)
    for _ in range(50):
        estimate.observe([50], ["a"], [[50_000]])
    assert not estimate.stale
    estimate.adopt()
    assert margin_of(estimate, [50]) == pytest.approx(LEAST_MARGIN)
    assert margin_of(estimate, [20, 30]) == pytest.approx(SEEDED_MARGIN)  # only equal lengths were measured
    estimate.observe([20, 30], ["a"], [[50_000]])
    estimate.adopt()
    assert margin_of(estimate, [20, 30]) == pytest.approx(LEAST_MARGIN)
    assert margin_of(estimate, [100]) == pytest.approx(SEEDED_MARGIN, rel=1e-3)
    estimate.observe([100] * 3, ["a"], [[300_000]])  # more than twice what was seen
    assert estimate.stale
    estimate.adopt()
    assert margin_of(estimate, [100] * 3) == pytest.approx(LEAST_MARGIN)


def test_the_margin_grows_with_the_distance_from_what_was_measured() -> None:
    estimate, dice = estimate_of(1000), random.Random(4)
    for _ in range(50):
        lengths = [dice.randint(5, 60) for _ in range(dice.randint(1, 6))]
        estimate.observe(lengths, ["a"], [[1000 * sum(lengths)]])
    estimate.adopt()
    margins = [margin_of(estimate, [size, *[size + 2] * 5]) for size in (30, 50, 60, 80, 200)]
    assert margins[0] == pytest.approx(LEAST_MARGIN)
    assert margins == sorted(margins)
    assert LEAST_MARGIN < margins[2] < SEEDED_MARGIN < margins[-1]


def test_longer_sequences_are_run_dry_anew() -> None:
    runs: list[list[str]] = []
    longest = {"a": 10, "b": 80}

    def dry_run(names: Sequence[str]) -> list[Any]:
        runs.append(list(names))
        long = max(longest[name] for name in names)
        return [([n], [[1000 * n + n * n]]) for n in (long // 4, long // 2, long)]

    estimate = MemoryEstimate(lambda names: "all", dry_run)
    estimate.activations({"a": [10]}, ["a"])
    estimate.predict({"a": [40]}, ["a"])
    estimate.activations({"a": [10] * 9}, ["a"])
    assert runs == [["a"]]
    assert estimate.activations({"b": [80]}, ["a", "b"])[0] >= 80_000 + 80 * 80
    estimate.activations({"b": [70]}, ["b"])
    assert runs == [["a"], ["a", "b"]]
    again = MemoryEstimate(lambda names: "all", dry_run)
    again.load_state(estimate.state())
    again.activations({"b": [80]}, ["b"])
    assert len(runs) == 2


def test_beyond_what_was_measured_a_bound_is_no_less_than_samples_say() -> None:
    estimate = estimate_of(1000)
    for _ in range(10):
        estimate.observe([10, 30], ["a"], [[20_000]])  # half of what samples say
    estimate.adopt()
    assert estimate.activations({"a": [10, 30]}, ["a"])[0] < 100_000
    assert estimate.predict({"a": [50]}, ["a"])[0] < 40_000
    assert estimate.activations({"a": [50]}, ["a"])[0] > 50_000


def test_another_form_of_micro_batches_is_beyond_what_was_measured() -> None:
    """Many short sequences where as many rows of long ones were measured: the fit cannot tell rows from
    squares, though no extent is larger."""
    estimate = estimate_of(1000)
    for rows in (60, 70, 80, 90, 100):
        assert estimate.worth_measuring({"a": [rows, rows - 1]}, ["a"])
        estimate.observe([rows, rows - 1], ["a"], [[1000 * rows]])  # half of what samples say
    for rows in range(40, 100):
        estimate.worth_measuring({"a": [rows, rows - 1]}, ["a"])
        estimate.observe([rows, rows - 1], ["a"], [[1000 * rows]])
    estimate.adopt()
    assert estimate.activations({"a": [80, 79]}, ["a"])[0] < 100_000
    assert not estimate.worth_measuring({"a": [80, 79]}, ["a"])
    short = [10] * 15 + [9]
    assert sum(short) <= 100 + 99
    assert estimate.activations({"a": short}, ["a"])[0] > 1000 * sum(short)
    assert estimate.worth_measuring({"a": short}, ["a"])


def test_between_decisions_nothing_is_sampled() -> None:
    runs = []

    def dry_run(names: Sequence[str]) -> list[Any]:
        runs.append(names)
        return [([n], [[1000 * n]] * 2) for n in (10, 20)]

    estimate = MemoryEstimate("+".join, dry_run, [[None]] * 2)
    assert estimate.as_adopted.activations({"a": [10]}, ["a"]) == [float("inf")] * 2
    assert estimate.as_adopted.predict({"a": [10]}, ["a"]) == [0, 0]
    assert not runs
    estimate.activations({"a": [10]}, ["a"])
    before = estimate.as_adopted.activations({"a": [20]}, ["a"])
    assert estimate.as_adopted.activations({"a": [400]}, ["a"])[0] > 400_000
    assert len(runs) == 1
    assert estimate.as_adopted.activations({"a": [20]}, ["a"]) == before
    assert estimate.as_adopted.activations({"b": [20]}, ["b"]) == [float("inf")] * 2


def test_entries_hold_what_has_changed() -> None:
    estimate, other = estimate_of(1000), estimate_of(1000)
    estimate.predict({"b": [50]}, ["b"])
    assert sorted(estimate.changes()) == ["a", "b"]
    assert estimate.changes() == {}
    estimate.observe([50], ["a"], [[52_000]])
    estimate.adopt()
    changes = estimate.changes()
    assert list(changes) == ["a"]
    other.observe([70], ["a"], [[99_000]])
    other.load_changes(changes)
    assert other.activations({"a": [60]}, ["a"]) == estimate.activations({"a": [60]}, ["a"])
    other.adopt()
    assert other.activations({"a": [60]}, ["a"]) == estimate.activations({"a": [60]}, ["a"])
    assert other.changes() == {}
    other.load_state(estimate.state())
    assert sorted(other.changes()) == ["a", "b"]


def margin_of(estimate: MemoryEstimate, lengths: list[int]) -> float:
    return estimate.activations({"a": lengths}, ["a"])[0] / estimate.predict({"a": lengths}, ["a"])[0] - 1


def test_a_mixture_of_adapters_has_a_fit_of_its_own() -> None:
    runs: list[list[str]] = []

    def dry_run(names: object) -> list[Any]:
        runs.append(sorted(names))  # type: ignore[call-overload]
        return [([10], [[10_000 * len(runs)]]), ([20], [[20_000 * len(runs)]])]

    estimate = MemoryEstimate(lambda names: "+".join(sorted(names)), dry_run)
    alone = estimate.predict({"a": [10]}, ["a"])
    together = estimate.predict({"a": [10]}, ["a", "b"])
    assert estimate.predict({"a": [10]}, ["b", "a"]) == together
    assert together[0] == pytest.approx(2 * alone[0], rel=1e-3)
    assert runs == [["a"], ["a", "b"]]


def test_its_state_goes_on_alike() -> None:
    estimate, other = estimate_of(1000), estimate_of(777)
    for rows in (20, 50):
        estimate.observe([rows], ["a"], [[1010 * rows]])
        estimate.worth_measuring({"a": [10]}, ["a"])
    estimate.adopt()
    estimate.observe([80], ["a"], [[1020 * 80]])
    other.load_state(estimate.state())
    for _ in range(2):
        assert other.activations({"a": [33]}, ["a"]) == estimate.activations({"a": [33]}, ["a"])
        estimate.adopt()
        other.adopt()
    assert other.state() == estimate.state()


def test_early_micro_batches_are_measured_larger_ones_and_others_now_and_then() -> None:
    estimate = estimate_of(1000)

    def worth(lengths: list[int], among: Sequence[str] = "a") -> bool:
        found = estimate.worth_measuring({"a": lengths}, among)
        if found:
            estimate.observe(lengths, among, [[1000 * sum(lengths)]])
        return found

    assert not worth([10, 10], "ab")  # of a mixture that nobody has asked about
    estimate.predict({"a": [10]}, "ab")
    measured = [worth([10, 10]) for _ in range(600)]
    assert all(measured[:10])
    assert sum(measured[10:]) == 2
    assert worth([21])  # more rows, and more squares
    assert worth([22, 1])
    assert not worth([21])
    assert worth([1] * 24)  # more rows
    assert not worth([100], "ab")  # of another mixture
