"""Predicts a run's memory before it starts: which tasks run together, wait, or never fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlora.config.run_config import RunConfig
from mlora.engine.adapter_memory import AdapterMemory
from mlora.engine.memory_limit import Candidate, MemoryLimit, in_units
from mlora.errors import MemoryLimitError
from mlora.planning.memory_needs import memory_need
from mlora.planning.task_memory import LIMIT, TaskMemory
from mlora.scheduler import ORDERS, PLACEMENTS, Admission, Room, admit
from mlora.tasks.groups import held_batches, slot_count
from mlora.tasks.task import Task


@dataclass(frozen=True)
class TaskPlan:
    """What a task needs.

    Attributes:
        priority: a higher one goes first.
        states: bytes at each stage while the task is admitted.
        largest: bytes of its largest micro-batch at each stage.
        verdict: `runs`, `waits`, or why it never fits.
    """

    name: str
    priority: int
    states: tuple[int, ...]
    largest: tuple[int, ...]
    verdict: str

    @property
    def peak(self) -> tuple[int, ...]:
        """The most bytes at each stage beyond the base model."""
        return tuple(a + b for a, b in zip(self.states, self.largest, strict=True))


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs.

    Attributes:
        base: bytes of each stage's process without any task.
        tasks: in the order of the config.
        limit: bytes, or None.
        places: the most tasks that run at once, as a sweep's trials; None = as many as fit.
    """

    base: tuple[int, ...]
    tasks: tuple[TaskPlan, ...]
    limit: int | None
    places: int | None = None

    @property
    def never(self) -> list[TaskPlan]:
        """Tasks that never fit."""
        return [task for task in self.tasks if task.verdict not in ("runs", "waits")]

    def table(self) -> list[list[str]]:
        """Returns rows of text, titles first."""
        stages = range(len(self.base))
        titles = ["memory"] if len(self.base) == 1 else [f"stage {stage}" for stage in stages]
        rows = [["", "priority", *titles, ""]]
        rows.append(["base model and libraries", "", *map(in_units, self.base), ""])
        for task in self.tasks:
            verdict = task.verdict if task.verdict in ("runs", "waits") else "never fits"
            rows.append([task.name, str(task.priority), *map(in_units, task.peak), verdict])
        return rows

    def lines(self) -> list[str]:
        """Returns lines for the user, except about tasks that never fit."""
        if self.limit is None:
            how = "all adapters run together" if self.places is None else f"trials run {self.places} at once"
            return [f"no scheduler.memory_limit: {how}"]
        running = [task.name for task in self.tasks if task.verdict == "runs"][: self.places]
        waiting = [task.name for task in self.tasks if task.verdict == "waits"]
        where = "" if self.places is None else f"of {len(self.tasks)} sampled trials "
        first = f"{len(running)} run together first" if running else "none runs"
        found = [f"memory_limit {in_units(self.limit)}: {where}{first}"]
        return [*found, *([f"{len(waiting)} wait: {', '.join(waiting)}"] if waiting else [])]


def memory_plan(
    config: RunConfig, tasks: Sequence[Task], adapters: AdapterMemory, base: Sequence[int]
) -> MemoryPlan:
    """Predicts what a run needs; without a limit all tasks run.

    Micro-batches are predicted for each task alone. `adapters` must know none of the tasks yet; `base` has
    the bytes of each stage's process before any task.
    """
    known = TaskMemory(adapters)
    for task in tasks:
        known.know(task)
    limit, room, never = config.scheduler.limit_bytes, Room(), {}
    if limit is not None:
        memory = MemoryLimit(adapters, limit, base, 0, held=held_batches(config), name=LIMIT)
        never = _never(memory, [known.candidate(task) for task in tasks])
        room = memory.room()
    fitting = [task for task in tasks if task.name not in never]
    admitted = _admission(config, fitting, known, adapters, room).slots
    plans = []
    for task in tasks:
        largest = known.largest(task)
        needed = adapters.estimate.predict({task.name: largest}, [task.name])
        verdict = never.get(task.name) or ("runs" if task.name in admitted else "waits")
        states = adapters.admitted(task.name)
        plans.append(TaskPlan(task.name, task.config.priority, states, tuple(needed), verdict))
    return MemoryPlan(tuple(base), tuple(plans), limit)


def _never(memory: MemoryLimit, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Returns why tasks never fit, by name: those that a run refuses before its first step."""
    found = {}
    for one in candidates:
        try:
            memory.check(one)
        except MemoryLimitError as error:
            found[one.name] = str(error)
    return found


def _admission(
    config: RunConfig, tasks: Sequence[Task], known: TaskMemory, adapters: AdapterMemory, room: Room
) -> Admission:
    needs = [
        memory_need(task, place, adapters.admitted(task.name), known.largest(task))
        for place, task in enumerate(tasks)
    ]
    scheduler = config.scheduler
    order, placement = ORDERS[scheduler.policy], PLACEMENTS[scheduler.placement]
    return admit(needs, room, slot_count(config), order, placement, adapters.estimate)
