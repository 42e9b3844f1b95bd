"""Predicts a run's memory before it starts: who runs together, waits, or never fits, and what is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import gettempdir

from mlora.config.run_config import RunConfig
from mlora.errors import MemoryLimitError
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.room import MemoryLimit, Room, in_units, sum_of
from mlora.offload.base_bytes import BaseBytes
from mlora.offload.options import STATE_BYTES, OffloadOptions
from mlora.planning.task_memory import LIMIT, know_task, memory_need
from mlora.scheduler import ORDERS, PLACEMENTS, admit
from mlora.tasks.groups import held_batches, slot_count
from mlora.tasks.task import Task


@dataclass(frozen=True)
class TaskPlan:
    """What a task needs.

    Attributes:
        priority: a higher one goes first.
        peak: the most bytes at each stage beyond the base model: of its states and its largest micro-batch.
        verdict: `runs`, `waits`, or why it is refused.
        optimizer: bytes of its optimizer's states at each stage.
        activations: bytes of its largest micro-batch at each stage.
    """

    name: str
    priority: int
    peak: tuple[int, ...]
    verdict: str
    optimizer: tuple[int, ...] = ()
    activations: tuple[int, ...] = ()


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

    @property
    def together(self) -> int:
        """Bytes of all processes while as many tasks as may run at once hold their largest micro-batches."""
        needs = sorted((sum(task.peak) for task in self.tasks), reverse=True)
        return sum(self.base) + sum(needs[: self.places])

    @property
    def optimizer(self) -> tuple[int, ...]:
        """Bytes of the optimizer's states at each stage, of the tasks that train together at first."""
        return sum_of([task.optimizer for task in self._first], len(self.base))

    @property
    def activations(self) -> tuple[int, ...]:
        """Bytes at each stage while these tasks hold their largest micro-batches."""
        return sum_of([task.activations for task in self._first], len(self.base))

    @property
    def _first(self) -> list[TaskPlan]:
        running = [task for task in self.tasks if task.verdict == "runs"]
        return sorted(running, key=lambda task: sum(task.peak), reverse=True)[: self.places]

    def table(self) -> list[list[str]]:
        """Returns rows of text, titles first."""
        stages = range(len(self.base))
        titles = ["memory"] if len(self.base) == 1 else [f"stage {stage}" for stage in stages]
        rows = [["", "priority", *titles, "at the start"]]
        rows.append(["base model and libraries", "", *map(in_units, self.base), ""])
        for task in self.tasks:
            verdict = task.verdict if task.verdict in ("runs", "waits") else "refused"
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
    for task in tasks:
        know_task(adapters, task)
    limit, room, never = config.scheduler.limit_bytes, Room(), dict[str, str]()
    if limit is not None:
        memory = MemoryLimit(adapters, limit, base, 0, held=held_batches(config), name=LIMIT)
        for task in tasks:
            try:
                memory.check(task.name)
            except MemoryLimitError as error:
                never[task.name] = str(error)
        room = memory.room()
    needs = [memory_need(task, place, adapters) for place, task in enumerate(tasks)]
    fitting = [need for need in needs if need.name not in never]
    order, placement = ORDERS[config.scheduler.policy], PLACEMENTS[config.scheduler.placement]
    bounds = adapters.estimate.activations
    admitted = admit(fitting, room, slot_count(config), order, placement, bounds).slots
    plans = []
    for need in needs:
        largest = adapters.estimate.predict({need.name: need.largest}, [need.name])
        peak = tuple(map(sum, zip(need.states, largest, strict=True)))
        verdict = never.get(need.name) or ("runs" if need.name in admitted else "waits")
        moments = adapters.moments(need.name)
        plans.append(TaskPlan(need.name, need.priority, peak, verdict, moments, tuple(largest)))
    return MemoryPlan(tuple(base), tuple(plans), limit)


@dataclass(frozen=True)
class Placement:
    """Where the parts of a run are.

    Attributes:
        base: of each stage.
        options: what was asked for.
        plan: says what the tasks that train at once need; None = it is not known.
        forecast: lines on the time of a micro-batch, and on what bounds it.
        trained: weights of the model that are trained; 0 = adapters are.
    """

    base: Sequence[BaseBytes]
    options: OffloadOptions
    plan: MemoryPlan | None = None
    forecast: Sequence[str] = ()
    trained: int = 0

    def table(self) -> list[list[str]]:
        """Returns rows of text, titles first."""
        stages = range(len(self.base))
        titles = ["size"] if len(self.base) == 1 else [f"stage {stage}" for stage in stages]
        rows = [["", "where", *titles]]

        def row(what: str, where: str, sizes: Sequence[int]) -> None:
            rows.append([what, where, *map(in_units, sizes)])

        streamed = [base.streamed for base in self.base]
        row("base model, what stays" if any(streamed) else "base model", "memory", self._of_base("resident"))
        if any(streamed):
            row("base model, slots for blocks", "memory", self._of_base("slots"))
            row("base model, weights of blocks", "disk", streamed)
        if self.plan is not None:
            row("optimizer states", "memory", self.plan.optimizer)
            kept = self.options.activations == "keep"
            row("activations" if kept else "activations, if all were kept", "memory", self.plan.activations)
        if self.trained:
            states = [STATE_BYTES * self.trained]
            where = "disk" if self.options.optimizer == "disk" else "memory"
            row("fp32 weights and moments", where, states)
            row("the same in each checkpoint", "disk", states)
        return rows

    def lines(self) -> list[str]:
        """Returns what the table cannot say, one fact a line."""
        streamed, converted = sum(self._of_base("streamed")), sum(self._of_base("converted"))
        found = []
        if streamed > converted:
            found.append(f"{in_units(streamed - converted)} of weights are read from the model's own files")
        if converted and self.trained:
            found.append(
                f"{in_units(converted)} of weights are trained, so they are copied into scratch files in "
                f"{self._folders()}"
            )
        elif converted:
            found.append(
                f"{in_units(converted)} of weights have another dtype or layout in the model's files; the "
                f"run converts them into scratch files in {self._folders()}"
            )
        return [*found, *self.forecast]

    def _folders(self) -> str:
        return ", ".join(self.options.folders) or gettempdir()

    def _of_base(self, part: str) -> list[int]:
        return [int(getattr(base, part)) for base in self.base]
