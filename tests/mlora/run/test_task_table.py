"""A run's tasks over random arrivals, priorities, ends and pauses, on an engine without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlora.config.sections import SchedulerConfig
from mlora.data.dataset import Sample
from mlora.data.record import sequence_lengths
from mlora.data.sampler import BatchPlan
from mlora.data.token_table import Samples
from mlora.memory.room import Room
from mlora.objectives.objective import CrossEntropy
from mlora.run.decisions import Decisions
from mlora.run.reporter import Reporter
from mlora.run.task_table import TaskTable
from mlora.store.queue import Request
from mlora.store.run_folder import RunFolder
from mlora.tasks.groups import Group
from mlora.tasks.task import Progress

FREE = 1000


class FakeEngine:
    """Knows the names of its adapters."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.replicas, self.memory_after, self.peak_memory = 1, [], 0
        self.registry = None

    @property
    def adapters(self) -> list[str]:
        return list(self.names)

    def create_adapter(self, name: str, *_: Any, **__: Any) -> None:
        assert name not in self.names
        self.names[name] = 0

    def remove_adapter(self, name: str) -> None:
        del self.names[name]


class Estimate:
    """A byte a row."""

    stale = False

    def activations(self, lengths: Any, among: Any) -> list[float]:
        return [float(sum(map(sum, lengths.values())))]

    predict = activations

    @property
    def as_adopted(self) -> Any:
        return self

    def adopt(self) -> None:
        pass


class FakeMemory:
    """A limit of `FREE`; each task says what its states take."""

    def __init__(self) -> None:
        self.estimate, self.base, self.reserved, self.limit = Estimate(), [0], 0, FREE
        self.adapters, self.fresh = self, True
        self._takes: dict[str, int] = {}
        self._batches: dict[str, Any] = {}

    def know(self, name: str, lora: Any, optim: Any, longest: int, *, batches: Any, **_: Any) -> None:
        self._takes[name], self._batches[name] = optim, batches

    def knows(self, name: str) -> bool:
        return name in self._takes

    def check(self, name: str) -> None:
        if not self.fits(name):
            raise ValueError("is too large")

    def look_again(self, tasks: Any) -> None:
        """Nothing grows."""

    def fits_barely(self, name: str) -> bool:
        return self.fits(name)

    def fits(self, name: str) -> bool:
        return self._takes[name] + sum(self.largest(name)) <= FREE

    def admitted(self, name: str) -> tuple[int, ...]:
        return (self._takes[name],)

    def largest(self, name: str, batch_size: int | None = None) -> list[int]:
        found: list[int] = self._batches[name](lambda lengths: float(sum(lengths)), batch_size)
        return found

    def room(self) -> Room:
        return Room((FREE,))

    def entry(self) -> None:
        return None


def task(name: str, priority: int, takes: int, rows: int, steps: int) -> Any:
    lengths = [rows]
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(priority=priority, init_from=None),
        lora=None,
        optim=takes,
        seed=0,
        eval_data=None,
        data=SimpleNamespace(samples=Samples.of([(Sample(tuple(range(rows)), tuple(range(rows))), None)])),
        usual_lengths=[rows],
        plan=BatchPlan(1, 1, 1, False, 0),
        total_steps=steps,
        progress=Progress(),
        next_lengths=lambda: lengths,
        lengths_of=lambda batch: lengths,
        lengths=sequence_lengths,
        objective=CrossEntropy(),
        alive=True,
    )


class FakeQueue:
    """Requests in memory, and nothing else."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.journal: dict[int, Any] = {}

    def show(self, views: Any, run: Any) -> None:
        """Nobody looks."""

    def requests(self, after: int = 0) -> list[Request]:
        return [request for request in self.asked if request.number > after]

    def changed(self) -> bool:
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def entries(self, after: int = -1) -> dict[int, Any]:
        return self.journal

    def write_entry(self, iteration: int, entry: Any) -> None:
        assert iteration not in self.journal
        self.journal[iteration] = entry


TASKS = st.tuples(st.integers(-1, 2), st.integers(0, 700), st.integers(1, 400), st.integers(1, 5))


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(["fcfs", "shortest_first"]))
def test_who_is_on_the_engine_over_random_days(data: st.DataObject, policy: Any) -> None:
    patch = pytest.MonkeyPatch()
    coming = {
        f"t{n}": task(f"t{n}", *fields)
        for n, fields in enumerate(data.draw(st.lists(TASKS, min_size=1, max_size=8)))
    }
    config = SimpleNamespace(
        output_dir="nowhere",
        adapters=[SimpleNamespace(name=name, priority=0, max_steps=1) for name in coming],
        sweep=None,
        at_once=len(coming),
        scheduler=SchedulerConfig(memory_limit=1, policy=policy),
        pipeline=SimpleNamespace(processes=1, stages=1, replicas=1, schedule="lorapp"),
    )
    engine, queue = FakeEngine(), FakeQueue()
    builder = SimpleNamespace(warnings=[], build=lambda adapter, _: coming[adapter.name])
    first = list(coming)[: data.draw(st.integers(1, len(coming)))]
    folder = RunFolder("nowhere")
    task_table: Any = TaskTable(
        engine,
        builder,
        [coming[n] for n in first],
        {},
        folder,
        Reporter(),
        FakeMemory(),  # type: ignore[arg-type]
    )
    decisions = Decisions(config, task_table)  # type: ignore[arg-type]
    with patch.context() as patched:
        patched.setattr("mlora.planning.task_memory.read_config", lambda _: None)
        patched.setattr(
            "mlora.run.decisions.submitted",
            lambda name, _: (SimpleNamespace(name=name, objective="cross_entropy"), []),
        )
        patched.setattr("mlora.run.task_table.set_aside", lambda e, t, folder: e.remove_adapter(t.name))
        patched.setattr(
            "mlora.run.task_table.bring_back", lambda e, t, group, folder: e.create_adapter(t.name)
        )
        decisions.start()
        decisions.begin(queue, 0)  # type: ignore[arg-type]
        later = [name for name in coming if name not in first]
        iteration, waited = 0, 0
        while task_table.running() or later:
            for _ in range(data.draw(st.integers(0, 2))):
                if later and data.draw(st.booleans()):
                    _ask(queue, "submit", later.pop(0))
                else:
                    kind = data.draw(st.sampled_from(["pause", "unpause", "unpause", "cancel"]))
                    _ask(queue, kind, data.draw(st.sampled_from(sorted(coming))))
            decisions.asked()
            while (due := decisions.due(iteration)) is not None:
                decisions.decide(due, at_once=due > iteration)
                iteration = due
                _check(task_table, engine, policy)
            if not task_table.members():
                waited += 1
                assert not task_table.running()
                if waited > 20:
                    break
            for slot, members in task_table.members().items():
                batch = task_table.next_batch(Group(slot, members, iteration))
                assert batch[0] is members[0]  # the first always goes on: nobody starves
                for one in batch:
                    one.progress.step += 1
                    one.progress.batches += 1
                    if one.progress.step == one.total_steps:
                        one.progress.state, one.alive = "finished", False
                        engine.remove_adapter(one.name)
            iteration += 1


def _ask(queue: FakeQueue, kind: Any, name: str) -> None:
    queue.asked.append(Request(len(queue.asked) + 1, kind, name, {}))


def _check(task_table: Any, engine: FakeEngine, policy: str) -> None:
    """Exactly the admitted are on the engine, and nobody waits who stands before one of them and fits."""
    slots = task_table.admission.slots
    assert set(engine.adapters) == set(slots)
    assert {one.name for one in task_table.running()} >= set(slots)
    assert bool(slots) == bool(task_table.running())
    order = {one.name: place for place, one in enumerate(task_table.tasks)}

    def key(one: Any) -> tuple[float, ...]:
        work = one.next_lengths()[0] * (one.total_steps - one.progress.step)
        return (-one.config.priority, *([work] if policy != "fcfs" else []), order[one.name])

    here = sorted((one for one in task_table.running() if one.name in slots), key=key)
    for one in task_table.waiting():
        before = [other for other in here if key(other) < key(one)]
        beside = [*before, one]
        states = sum(other.optim for other in beside)
        assert states + sum(other.next_lengths()[0] for other in beside) > FREE, one.name
