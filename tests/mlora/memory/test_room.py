"""What a limit leaves: what is learned of a process's own memory, and what a run publishes of it."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.room import MIB, MemoryLimit
from mlora.run.status_publisher import StatusPublisher
from mlora.scheduler import Admission


def memory_of(estimate: Any, look: Any = None, base: int = 500 * MIB, earlier: int = 0) -> MemoryLimit:
    adapters: Any = SimpleNamespace(
        estimate=estimate,
        at_rest=lambda names: (0,),
        admitted=lambda name: (5,),
        knows=lambda name: True,
        largest=lambda name, batch_size=None: [80] * min(1 if batch_size is None else batch_size, 1),
    )
    return MemoryLimit(adapters, 4 << 30, [base], base, look=look, earlier=earlier)


def test_growth_that_was_seen_as_a_peak_counts_once() -> None:
    memory = memory_of(SimpleNamespace(stale=False))
    for passed in range(10):
        memory.took([], [100 * MIB], peak=850 * MIB, after=())  # something else is under way
        assert memory.base == [500 * MIB]
        assert memory.reserved == 250 * MIB, passed
    memory.took([], [100 * MIB], peak=850 * MIB, after=[750 * MIB])
    assert memory.base == [750 * MIB]
    assert memory.reserved == 32 * MIB
    memory.took([], [100 * MIB], peak=900 * MIB, after=[750 * MIB])
    assert memory.reserved == 50 * MIB


def test_what_has_become_base_is_no_longer_kept_in_reserve() -> None:
    memory = memory_of(SimpleNamespace(stale=False))
    kept = []
    for base in (500, 505, 540, 590, 590):  # less than 8 MiB are not worth a decision
        memory.took([], [100 * MIB], peak=600 * MIB, after=[base * MIB])
        kept.append((memory.base[0] // MIB, memory.reserved // MIB))
    assert kept == [(500, 96), (500, 96), (540, 56), (590, 32), (590, 32)]
    again = memory_of(SimpleNamespace(stale=False, load_state=lambda state: 0))
    again.load_state({"estimate": {}, **memory._figures()})
    assert again._figures() == memory._figures()


def test_a_peak_that_was_foreseen_is_not_kept_in_reserve() -> None:
    memory = memory_of(SimpleNamespace(stale=False))
    for passed in range(10):  # of a task that goes on beyond the limit
        memory.took([], [6000 * MIB], peak=(5000 + passed) * MIB, after=())
    assert memory.reserved == 32 * MIB
    memory.took([], [math.inf], peak=9000 * MIB, after=())  # nothing is known of it yet
    assert memory.reserved == 32 * MIB


def test_what_is_published_samples_nothing() -> None:
    runs: list[Any] = []

    def dry_run(names: Any) -> Any:
        runs.append(names)
        return [([rows], [[1000 * rows]]) for rows in (4, 8)]

    estimate = MemoryEstimate("+".join, dry_run)
    shown: list[Any] = []
    queue: Any = SimpleNamespace(show=lambda *views: shown.append(views))
    tasks: Any = [
        SimpleNamespace(name=name, usual_lengths=[6], progress=SimpleNamespace(state="running"))
        for name in "ab"
    ]
    table: Any = SimpleNamespace(
        memory=memory_of(estimate),
        admission=Admission({"a": 0}, 1, (1.0,)),
        alive=lambda: tasks,
        members=lambda: {0: tasks[:1]},
        engine=SimpleNamespace(peak_memory=0),
    )
    publisher = StatusPublisher(queue, table)
    publisher.show(now=True)
    assert not runs
    assert {view["batch_bytes"] for view in shown[-1][0].values()} == {0}
    estimate.activations({"a": [6]}, ["a"])
    publisher.show(now=True)
    assert runs == [["a"]]
    views, run = shown[-1]
    assert (views["a"]["state"], views["b"]["state"]) == ("running", "waiting")
    assert views["a"]["batch_bytes"] == estimate.predict({"a": [6]}, ["a"])[0] > 0
    assert views["b"]["batch_bytes"] == 0
    assert run["memory"]["predicted_bytes"] == 500 * MIB + 5 + views["a"]["batch_bytes"]


def test_longer_sequences_are_sampled_at_the_next_decision_that_can_do_so() -> None:
    answers: list[Any] = [[([4], [[4000]]), ([8], [[8000]])], [], [([64], [[90_000]])]]
    estimate = MemoryEstimate("+".join, lambda names: answers.pop(0))
    estimate.activations({"a": [6]}, ["a"])
    without = estimate.by_samples({"a": [64]}, ["a"])  # nothing can be sampled now
    assert estimate.as_adopted.by_samples({"a": [70]}, ["a"]) > without
    assert estimate.by_samples({"a": [64]}, ["a"]) == without
    estimate.adopt()
    sampled = estimate.by_samples({"a": [64]}, ["a"])
    assert sampled != without
    assert sampled == [pytest.approx(90_000, rel=0.1)]
    assert estimate.by_samples({"a": [60]}, ["a"]) < sampled, "it asks no more"


def test_a_task_is_refused_for_what_never_changes_only() -> None:
    """The base as it was loaded, and samples: neither growth of the process nor a margin that has grown."""
    samples = [([rows], [[rows * MIB]]) for rows in (10, 40, 80)]
    estimate = MemoryEstimate("+".join, lambda names: samples)
    memory = memory_of(estimate)
    memory.limit = 500 * MIB + 32 * MIB + 84 * MIB
    memory.check("a")
    assert memory.fits_barely("a")
    assert not memory.fits("a")
    memory.took([], [100 * MIB], peak=500 * MIB, after=[600 * MIB])
    estimate.observe([80], ["a"], [[78 * MIB]])
    estimate.adopt()
    memory.check("a")
    assert not memory.fits_barely("a")
    memory.limit -= MIB
    with pytest.raises(
        ValueError, match="the base model and libraries take 500 MiB, and 32 MiB are kept in reserve"
    ):
        memory.check("a")


def test_growth_takes_from_the_least_reserve_of_a_task_that_stays_alone() -> None:
    samples = [([rows], [[rows * MIB]]) for rows in (10, 40, 80)]
    estimate = MemoryEstimate("+".join, lambda names: samples)
    used = [610 * MIB]
    memory = memory_of(estimate, look=lambda: used)
    memory.limit = 500 * MIB + 32 * MIB + 84 * MIB
    memory.took([], [100 * MIB], peak=500 * MIB, after=[610 * MIB])
    for now, fits in ((610, False), (540, False), (532, True), (500, True)):
        used[:] = [now * MIB]
        memory.look_again([])
        assert memory.base == [now * MIB]
        assert memory.fits_barely("a") is fits, now
        assert not memory.fits("a")


def test_the_smallest_base_of_all_processes_is_what_refusals_go_by() -> None:
    samples = [([rows], [[rows * MIB]]) for rows in (10, 40, 80)]

    def process(base: int, earlier: int = 0) -> MemoryLimit:
        estimate = MemoryEstimate("+".join, lambda _: samples)
        memory = memory_of(estimate, base=base * MIB, earlier=earlier * MIB)
        memory.limit = 490 * MIB + 32 * MIB + 84 * MIB
        return memory

    process(489).check("a")
    process(600, earlier=111).check("a")
    with pytest.raises(ValueError, match="the base model and libraries take 492 MiB"):
        process(600, earlier=108).check("a")
    memory = process(600)
    memory.load_state(process(489).state())
    memory.load_state(process(700).state())
    memory.check("a")
    assert not memory.fits_barely("a")  # in this process


def test_what_cannot_be_measured_is_refused_where_no_process_could() -> None:
    estimate = MemoryEstimate("+".join, lambda _: [])
    memory = memory_of(estimate)
    memory.adapters.begun = lambda name: (3,)  # type: ignore[method-assign]
    memory.limit = 596 * MIB + 4
    memory.check("a")
    memory.limit -= 1
    with pytest.raises(
        ValueError, match="and 96 MiB are kept in reserve: too little is left to measure what a"
    ):
        memory.check("a")


def test_a_new_process_forgets_what_another_one_had_taken() -> None:
    memory = memory_of(SimpleNamespace(stale=False))
    for _ in range(9):
        memory.took([], [100 * MIB], peak=900 * MIB, after=[700 * MIB])
    assert memory.reserved == 100 * MIB
    state = {"estimate": {}, **memory._figures()}
    again = memory_of(SimpleNamespace(stale=False, load_state=lambda state: 0), lambda: [510 * MIB])
    again.load_state(state)
    assert again.base == [700 * MIB]
    again.look_again([])
    assert again.base == [510 * MIB]
    assert again.reserved == 86 * MIB  # of 96, less what has become base
