"""What a run will need of memory, before anything runs: who runs together, who waits, who never fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlora.config.run_config import RunConfig
from mlora.planning.memory_needs import memory_need
from mlora.planning.run_memory import RunMemory, in_units
from mlora.planning.task_memory import TaskMemory
from mlora.scheduler import ORDERS, PLACEMENTS, Admission, Room, admit
from mlora.tasks.groups import slot_count
from mlora.tasks.task import Task


@dataclass(frozen=True)
class TaskPlan:
    """What a task needs.

    Attributes:
        name: of the task.
        priority: a higher one goes first.
        states: bytes at each stage while it is admitted.
        largest: bytes at each stage of its largest micro-batch.
        verdict: `runs`, `waits`, or why it never fits.
    """

    name: str
    priority: int
    states: tuple[int, ...]
    largest: tuple[int, ...]
    verdict: str

    @property
    def peak(self) -> tuple[int, ...]:
        """Bytes at each stage beyond the base model, at most."""
        return tuple(a + b for a, b in zip(self.states, self.largest, strict=True))


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs.

    Attributes:
        base: bytes of each stage's process without any task.
        tasks: in the order of the config.
        limit: bytes, or none.
        places: how many run at once at most, as those of a sweep; none = as many as fit.
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
        """Rows of text, titles first."""
        stages = range(len(self.base))
        titles = ["memory"] if len(self.base) == 1 else [f"stage {stage}" for stage in stages]
        rows = [["", "priority", *titles, ""]]
        rows.append(["base model and libraries", "", *map(in_units, self.base), ""])
        for task in self.tasks:
            verdict = task.verdict if task.verdict in ("runs", "waits") else "never fits"
            rows.append([task.name, str(task.priority), *map(in_units, task.peak), verdict])
        return rows

    def lines(self) -> list[str]:
        """Lines for the user, but for tasks that never fit."""
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
    config: RunConfig, tasks: Sequence[Task], memory: TaskMemory, base: Sequence[int]
) -> MemoryPlan:
    """Predict what a run needs.

    Args:
        config: the run's.
        tasks: with their data.
        memory: knows none of them yet.
        base: bytes that each stage's process has before any task.

    Returns:
        The plan. Without a limit all tasks run; what micro-batches need is that of each task alone.

    Raises:
        ValueError: an adapter cannot be put on the base.
    """
    for task in tasks:
        memory.know(task)
    never = {} if config.scheduler.limit_bytes is None else _never(config, tasks, memory, base)
    fitting = [task for task in tasks if task.name not in never]
    admitted = _admission(config, fitting, memory, base).slots
    plans = []
    for task in tasks:
        largest = memory.largest(task)
        needed = memory.estimate.predict({task.name: largest}, [task.name])
        verdict = never.get(task.name) or ("runs" if task.name in admitted else "waits")
        states = memory.admitted(task.name)
        plans.append(TaskPlan(task.name, task.config.priority, states, tuple(needed), verdict))
    return MemoryPlan(tuple(base), tuple(plans), config.scheduler.limit_bytes)


def _never(
    config: RunConfig, tasks: Sequence[Task], memory: TaskMemory, base: Sequence[int]
) -> dict[str, str]:
    """Why tasks never fit: those that a run refuses before its first step."""
    run = RunMemory(config, memory, base, 0)
    found = {}
    for task in tasks:
        try:
            run.check(task)
        except ValueError as error:
            found[task.name] = str(error)
    return found


def _admission(
    config: RunConfig, tasks: Sequence[Task], memory: TaskMemory, base: Sequence[int]
) -> Admission:
    limited = config.scheduler.limit_bytes is not None
    room = RunMemory(config, memory, base, 0).room() if limited else Room()
    needs = [
        memory_need(task, place, memory.admitted(task.name), memory.largest(task))
        for place, task in enumerate(tasks)
    ]
    scheduler = config.scheduler
    order, placement = ORDERS[scheduler.policy], PLACEMENTS[scheduler.placement]
    return admit(needs, room, slot_count(config), order, placement, memory.estimate)
