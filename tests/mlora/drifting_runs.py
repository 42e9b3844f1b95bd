"""Runs of random tasks in processes that grow while they train, without a model: what a run learns of its own
memory is real, what is measured is made up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from mlora.config.sections import SchedulerConfig
from mlora.data.dataset import Sample
from mlora.data.sampler import BatchPlan
from mlora.data.token_table import Samples
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.room import MIB, MemoryLimit
from mlora.planning.task_memory import LIMIT
from mlora.run.decisions import Decisions
from mlora.run.task_table import TaskTable
from mlora.store.queue import Request
from mlora.store.run_folder import RunFolder
from mlora.tasks.groups import Group
from mlora.tasks.task import Progress

from tests.mlora.limited_runs import Watching

LOADED = 500 * MIB
ROW = MIB // 10  # what a micro-batch takes for each of its rows


@dataclass
class Process:
    """What a process takes beside its adapters, and the engine that lies in it.

    Args:
        dice: how it grows.
        states: bytes of each task's states, by name.
    """

    dice: random.Random
    states: dict[str, int]
    kept: int = 0
    loose: int = 0
    adapters: list[str] = field(default_factory=list)
    replicas: int = 1
    idle: bool = True
    registry: None = None
    peak_memory: int = LOADED

    def create_adapter(self, name: str, *_: Any, **__: Any) -> None:
        self.adapters.append(name)

    def remove_adapter(self, name: str) -> None:
        self.adapters.remove(name)

    @property
    def memory_after(self) -> list[int]:
        return [LOADED + self.kept + self.loose + sum(self.states[name] for name in self.adapters)]

    def look(self) -> list[int]:
        self.loose = 0
        return self.memory_after

    def train(self, rows: int) -> int:
        """Pass a micro-batch; returns what the process had in use at most."""
        used = self.memory_after[0] + int(ROW * rows * self.dice.uniform(0.99, 1.01))
        self.peak_memory = max(self.peak_memory, used)
        self.kept += self.dice.randint(0, 6) * MIB + rows * ROW // 20
        self.loose = self.dice.randint(0, 20) * MIB
        return used


class Adapters:
    """What adapters need, as `mlora.memory.adapter_memory.AdapterMemory` says it."""

    def __init__(self, states: dict[str, int]) -> None:
        self._states = states
        self._batches: dict[str, Any] = {}
        shapes = [[40], [200], [10] * 8, [20, 300]]
        dry = [(shape, [[ROW * sum(shape)]]) for shape in shapes]
        self.estimate = MemoryEstimate(lambda names: "all", lambda names: dry)

    def know(self, name: str, *_: Any, batches: Any, **options: Any) -> None:
        self._batches[name] = batches

    def knows(self, name: str) -> bool:
        return name in self._states

    def admitted(self, name: str) -> tuple[int, ...]:
        return (2 * self._states[name],)

    def at_rest(self, names: Sequence[str]) -> tuple[int, ...]:
        return (sum(self._states[name] for name in names),)

    def largest(self, name: str, batch_size: int | None = None) -> Sequence[int]:
        found: Sequence[int] = self._batches[name](lambda lengths: float(ROW * sum(lengths)), batch_size)
        return found


@dataclass
class Outcome:
    """What came of a run.

    Args:
        states: of its tasks, by name.
        lines: that were told.
        processes: that it took.
        tried: how often a task began alone that only barely fitted.
        beginnings: what the process had in use in each task's first micro-batch, as a share of the limit.
    """

    states: dict[str, str]
    lines: list[str]
    processes: int
    tried: int
    beginnings: list[float]


def drift(seed: int, patch: pytest.MonkeyPatch) -> Outcome:
    """Run random tasks to their end, in as many processes as that takes."""
    patch.setattr("mlora.planning.task_memory.read_config", lambda _: None)
    patch.setattr(
        "mlora.run.decisions.submitted",
        lambda name, _: (SimpleNamespace(name=name, objective="cross_entropy"), []),
    )
    patch.setattr("mlora.run.task_table.set_aside", lambda e, t, folder: e.remove_adapter(t.name))
    patch.setattr("mlora.run.task_table.bring_back", lambda e, t, *_: e.create_adapter(t.name))
    dice = random.Random(seed)
    kinds = [(dice.randint(10, 60) * MIB, dice.randint(100, 1500)) for _ in range(dice.randint(1, 3))]
    states, coming = {}, {}
    for number in range(dice.randint(3, 9)):  # some are twins
        states[f"t{number}"], rows = dice.choice(kinds)
        coming[f"t{number}"] = _task(f"t{number}", dice.randint(0, 2), rows, dice.randint(2, 12))
    most = max(2 * states[name] + 1.06 * ROW * sum(one.next_lengths()) for name, one in coming.items())
    limit = LOADED + 32 * MIB + int(most) + dice.randint(1, 40) * MIB
    return _Run(dice, limit, states, coming, dice.choice(["fcfs", "shortest_first"])).to_its_end()


class _Run:
    def __init__(
        self, dice: random.Random, limit: int, states: dict[str, int], coming: dict[str, Any], policy: Any
    ) -> None:
        self.dice, self.states, self.limit, self.coming = dice, states, limit, coming
        pipeline = {"processes": 1, "stages": 1, "replicas": 1, "schedule": "lorapp", "micro_batches": 1}
        self.config: Any = SimpleNamespace(
            adapters=[SimpleNamespace(name=name, priority=0, max_steps=-1) for name in coming],
            sweep=None,
            at_once=len(coming),
            scheduler=SchedulerConfig(memory_limit=limit, policy=policy),
            pipeline=SimpleNamespace(**pipeline),
        )
        self.asked: list[Request] = []
        self.journal: dict[int, Any] = {}
        self.told = Watching()
        self.later = list(coming)[dice.randint(1, len(coming)) :]
        self.iteration, self.outcome = 0, Outcome({}, self.told.lines, 0, 0, [])

    # the queue

    def show(self, views: Any, run: Any) -> None:
        """Nobody looks."""

    def requests(self, after: int = 0) -> list[Request]:
        return [request for request in self.asked if request.number > after]

    def changed(self) -> bool:
        return True

    def write_entry(self, iteration: int, entry: Any) -> None:
        assert iteration not in self.journal
        self.journal[iteration] = entry

    # the run

    def to_its_end(self) -> Outcome:
        checkpoint, tasks = None, [self.coming[n] for n in self.coming if n not in self.later]
        while self.later or any(task.alive for task in tasks):
            self.outcome.processes += 1
            assert self.outcome.processes <= len(self.coming) + 1
            checkpoint, tasks = self._process(checkpoint, tasks)
        self.outcome.states = {name: task.progress.state for name, task in self.coming.items()}
        return self.outcome

    def _process(self, checkpoint: Any, tasks: list[Any]) -> tuple[Any, list[Any]]:
        """Train until nobody is left, or only such as this process has no room for."""
        engine, builder = Process(self.dice, self.states), SimpleNamespace(warnings=[], build=self._build)
        known: Any = Adapters(self.states)
        memory = MemoryLimit(known, self.limit, [LOADED], LOADED, look=engine.look, name=LIMIT)
        parts: Any = engine, builder, tasks, {}, RunFolder("nowhere"), self.told, memory
        self.task_table, self.memory, self.engine = TaskTable(*parts), memory, engine
        self.decisions = Decisions(self.config, self.task_table)  # type: ignore[arg-type]
        if checkpoint is None:
            self.decisions.start()
        else:
            self.decisions.restore({"decisions": checkpoint, "adapters": {}})
        queue: Any = self
        self.decisions.begin(queue, self.iteration, None if checkpoint is None else {})
        while self._decide():
            self._iterate()
        return self.decisions.state(self.iteration), self.task_table.tasks

    def _build(self, adapter: Any, _: Any) -> Any:
        return self.coming[adapter.name]

    def _decide(self) -> bool:
        if self.later and (self.dice.random() < 0.2 or not self.task_table.members()):
            number = len(self.asked) + 1
            self.asked.append(Request(number, "submit", self.later.pop(0), {}))
        self.decisions.asked()
        while (due := self.decisions.due(self.iteration)) is not None:
            self.decisions.decide(due, at_once=due > self.iteration)
            self.iteration = due
        return bool(self.task_table.members())

    def _iterate(self) -> None:
        for slot, members in self.task_table.members().items():
            chosen = self.task_table.next_batch(Group(slot, members, self.iteration))
            new = [task for task in chosen if not task.progress.batches]
            self.outcome.tried += any(not self.memory.fits(task.name) for task in new)
            self.task_table.worth_measuring(chosen)
            used = self.engine.train(sum(task.next_lengths()[0] for task in chosen))
            if new:
                self.outcome.beginnings.append(used / self.limit)
            self.task_table.passed([])
            for task in chosen:
                self._step(task)
        self.iteration += 1

    def _step(self, task: Any) -> None:
        task.progress.step += 1
        task.progress.batches += 1
        if task.progress.step == task.total_steps:
            task.progress.state, task.alive = "finished", False
            self.engine.remove_adapter(task.name)


def _task(name: str, priority: int, rows: int, steps: int) -> Any:
    lengths = [rows]
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(priority=priority, init_from=None, best_rule=None),
        lora=None,
        optim=None,
        eval_data=None,
        data=SimpleNamespace(samples=Samples.of([(Sample(tuple(range(rows)), tuple(range(rows))), None)])),
        usual_lengths=lengths,
        kept_step=None,
        plan=BatchPlan(1, 1, 1, False, 0),
        total_steps=steps,
        progress=Progress(),
        next_lengths=lambda: lengths,
        lengths=lambda samples: lengths,
        objective=SimpleNamespace(reference=None, takes="sequences"),
        made_all_steps=False,
        alive=True,
    )
