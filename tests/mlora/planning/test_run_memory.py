"""What a run learns of its own memory, and what it publishes of it."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlora.config.config_file import resolve_config
from mlora.memory.estimate import DryRun
from mlora.planning.run_memory import MIB, RunMemory
from mlora.queue.status_publisher import StatusPublisher
from mlora.run.report import Silent
from mlora.scheduler import Admission, MemoryEstimate
from tiny_run import run_data


def memory_of(
    tiny_base: Path, folder: Path, estimate: Any, look: Any = None, base: int = 500 * MIB, earlier: int = 0
) -> RunMemory:
    data = run_data(tiny_base, folder, scheduler={"memory_limit": "4GiB"})
    tasks: Any = SimpleNamespace(
        estimate=estimate, at_rest=lambda name: (0,), admitted=lambda name: (5,), knows=lambda name: True
    )
    config = resolve_config(data, folder=folder)
    return RunMemory(config, tasks, [base], base, look=look, earlier=earlier)


def test_growth_that_was_seen_as_a_peak_counts_once(tiny_base: Path, tmp_path: Path) -> None:
    memory = memory_of(tiny_base, tmp_path, SimpleNamespace(stale=False))
    for passed in range(10):
        memory.took([], [100 * MIB], peak=850 * MIB, after=())  # something else is under way
        assert memory.base == [500 * MIB]
        assert memory.reserved == 250 * MIB, passed
    memory.took([], [100 * MIB], peak=850 * MIB, after=[750 * MIB])
    assert memory.base == [750 * MIB]
    assert memory.reserved == 32 * MIB
    memory.took([], [100 * MIB], peak=900 * MIB, after=[750 * MIB])
    assert memory.reserved == 50 * MIB


def test_what_has_become_base_is_no_longer_kept_in_reserve(tiny_base: Path, tmp_path: Path) -> None:
    memory = memory_of(tiny_base, tmp_path, SimpleNamespace(stale=False))
    kept = []
    for base in (500, 505, 540, 590, 590):  # less than 8 MiB are not worth a decision
        memory.took([], [100 * MIB], peak=600 * MIB, after=[base * MIB])
        kept.append((memory.base[0] // MIB, memory.reserved // MIB))
    assert kept == [(500, 96), (500, 96), (540, 56), (590, 32), (590, 32)]
    again = memory_of(tiny_base, tmp_path, SimpleNamespace(stale=False, load_state=lambda state: 0))
    again.load_state({"estimate": {}, **memory._figures()})
    assert again._figures() == memory._figures()


def test_a_peak_that_was_foreseen_is_not_kept_in_reserve(tiny_base: Path, tmp_path: Path) -> None:
    memory = memory_of(tiny_base, tmp_path, SimpleNamespace(stale=False))
    for passed in range(10):  # of a task that goes on beyond the limit
        memory.took([], [6000 * MIB], peak=(5000 + passed) * MIB, after=())
    assert memory.reserved == 32 * MIB
    memory.took([], [math.inf], peak=9000 * MIB, after=())  # nothing is known of it yet
    assert memory.reserved == 32 * MIB


def test_what_is_published_samples_nothing(tiny_base: Path, tmp_path: Path) -> None:
    runs: list[Any] = []

    def dry_run(names: Any) -> DryRun:
        runs.append(names)
        return DryRun([[None]], [([rows], [[1000 * rows]]) for rows in (4, 8)])

    estimate = MemoryEstimate("+".join, dry_run)
    shown: list[Any] = []
    queue: Any = SimpleNamespace(show=lambda *views: shown.append(views))
    engine: Any = SimpleNamespace(peak_memory=0)
    publisher = StatusPublisher(
        queue, engine, memory_of(tiny_base, tmp_path, estimate), 4 << 30, Silent().warn
    )
    tasks: Any = [
        SimpleNamespace(name=name, usual_lengths=[6], progress=SimpleNamespace(state="running"))
        for name in "ab"
    ]
    publisher.show(tasks, Admission({"a": 0}, 1, (1.0,)), now=True)
    assert not runs
    assert {view["batch_bytes"] for view in shown[-1][0].values()} == {0}
    estimate.activations({"a": [6]}, ["a"])
    publisher.show(tasks, Admission({"a": 0}, 1, (1.0,)), now=True)
    assert runs == [["a"]]
    views, run = shown[-1]
    assert (views["a"]["state"], views["b"]["state"]) == ("running", "waiting")
    assert views["a"]["batch_bytes"] == estimate.predict({"a": [6]}, ["a"])[0] > 0
    assert views["b"]["batch_bytes"] == 0
    assert run["memory"]["predicted_bytes"] == 500 * MIB + 5 + views["a"]["batch_bytes"]


def test_a_task_is_refused_for_what_never_changes_only(tiny_base: Path, tmp_path: Path) -> None:
    """The base as it was loaded, and samples: neither growth of the process nor a margin that has grown."""
    samples = [([rows], [[rows * MIB]]) for rows in (10, 40, 80)]
    estimate = MemoryEstimate("+".join, lambda names: DryRun([[None]], samples))
    task: Any = SimpleNamespace(name="a")
    memory = memory_of(tiny_base, tmp_path, estimate)
    memory.tasks.largest = lambda task: [80]  # type: ignore[method-assign]
    memory.limit = 500 * MIB + 32 * MIB + 84 * MIB
    memory.check(task)
    assert memory.fits_barely(task)
    assert not memory.fits(task)
    memory.took([], [100 * MIB], peak=500 * MIB, after=[600 * MIB])
    estimate.observe([80], ["a"], [[78 * MIB]])
    estimate.adopt()
    memory.check(task)
    assert not memory.fits_barely(task)
    memory.limit -= MIB
    with pytest.raises(ValueError, match="500 MiB are taken by the base model and libraries, and 32"):
        memory.check(task)


def test_growth_takes_from_the_least_reserve_of_a_task_that_stays_alone(
    tiny_base: Path, tmp_path: Path
) -> None:
    samples = [([rows], [[rows * MIB]]) for rows in (10, 40, 80)]
    estimate = MemoryEstimate("+".join, lambda names: DryRun([[None]], samples))
    task: Any = SimpleNamespace(name="a")
    used = [610 * MIB]
    memory = memory_of(tiny_base, tmp_path, estimate, look=lambda: used)
    memory.tasks.largest = lambda task: [80]  # type: ignore[method-assign]
    memory.limit = 500 * MIB + 32 * MIB + 84 * MIB
    memory.took([], [100 * MIB], peak=500 * MIB, after=[610 * MIB])
    for now, fits in ((610, False), (540, False), (532, True), (500, True)):
        used[:] = [now * MIB]
        memory.look_again([])
        assert memory.base == [now * MIB]
        assert memory.fits_barely(task) is fits, now
        assert not memory.fits(task)


def test_the_smallest_base_of_all_processes_is_what_refusals_go_by(tiny_base: Path, tmp_path: Path) -> None:
    samples = [([rows], [[rows * MIB]]) for rows in (10, 40, 80)]
    task: Any = SimpleNamespace(name="a")

    def process(base: int, earlier: int = 0) -> RunMemory:
        estimate = MemoryEstimate("+".join, lambda _: DryRun([[None]], samples))
        memory = memory_of(tiny_base, tmp_path, estimate, base=base * MIB, earlier=earlier * MIB)
        memory.tasks.largest = lambda task: [80]  # type: ignore[method-assign]
        memory.limit = 490 * MIB + 32 * MIB + 84 * MIB
        return memory

    process(489).check(task)
    process(600, earlier=111).check(task)
    with pytest.raises(ValueError, match="492 MiB are taken by the base model"):
        process(600, earlier=108).check(task)
    memory = process(600)
    memory.load_state(process(489).state())
    memory.load_state(process(700).state())
    memory.check(task)
    assert not memory.fits_barely(task)  # in this process


def test_what_cannot_be_measured_is_refused_where_no_process_could(tiny_base: Path, tmp_path: Path) -> None:
    task: Any = SimpleNamespace(name="a")
    estimate = MemoryEstimate("+".join, lambda _: DryRun([[None]], []))
    memory = memory_of(tiny_base, tmp_path, estimate)
    memory.tasks.largest = lambda task: [80]  # type: ignore[method-assign]
    memory.tasks.begun = lambda name: (3,)  # type: ignore[method-assign]
    memory.limit = 596 * MIB + 4
    memory.check(task)
    memory.limit -= 1
    with pytest.raises(ValueError, match="and 96 MiB kept in reserve: too little is left to measure what a"):
        memory.check(task)


def test_a_new_process_forgets_what_another_one_had_taken(tiny_base: Path, tmp_path: Path) -> None:
    memory = memory_of(tiny_base, tmp_path, SimpleNamespace(stale=False))
    for _ in range(9):
        memory.took([], [100 * MIB], peak=900 * MIB, after=[700 * MIB])
    assert memory.reserved == 100 * MIB
    state = {"estimate": {}, **memory._figures()}
    again = memory_of(
        tiny_base, tmp_path, SimpleNamespace(stale=False, load_state=lambda state: 0), lambda: [510 * MIB]
    )
    again.load_state(state)
    assert again.base == [700 * MIB]
    again.look_again([])
    assert again.base == [510 * MIB]
    assert again.reserved == 86 * MIB  # of 96, less what has become base
