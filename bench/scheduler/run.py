"""A real training run that goes on in turns, with the scheduler's calls timed inside of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from mlora.config.run_config import RunConfig
from mlora.memory.room import RESERVED, MemoryLimit
from mlora.model.base_info import BaseInfo
from mlora.planning.task_memory import know_task
from mlora.run.callbacks import Callbacks
from mlora.run.decisions import Decisions
from mlora.run.loop import TrainingLoop
from mlora.run.prepare import Prepared, limit_memory, make_engine
from mlora.run.reporter import Reporter
from mlora.run.task_table import TaskTable
from mlora.store.checkpoint_writer import CheckpointWriter
from mlora.store.queue import TaskQueue
from mlora.store.run_folder import RunFolder
from mlora.tasks.task import Task, TaskBuilder

from scheduler.timers import EACH, Stopwatch

Limit = Callable[[MemoryLimit, list[Task]], int]


def room_for(share: float) -> Limit:
    """A limit under which so much of the tasks fits: their states and their usual micro-batches.

    Args:
        share: of the tasks, between 0 and 1; the rest waits.
    """

    def limit(memory: MemoryLimit, tasks: list[Task]) -> int:
        for task in tasks:
            know_task(memory.adapters, task)
        fit = tasks[: max(1, round(share * len(tasks)))]
        names = [task.name for task in fit]
        batch = memory.estimate.activations({task.name: task.usual_lengths for task in fit}, names)
        states = sum(memory.adapters.admitted(name)[0] for name in names)
        return memory.base[0] + RESERVED + states + int(batch[0])

    return limit


class TurnRun:
    """A run as `mlora train` makes it, that can be let go on for some iterations at a time.

    Its objects are the library's; the methods of single ones are replaced by timed ones.

    Args:
        config: the run's; its folder is not there yet.
        limit: in place of the config's limit, which must be there then.
        measure_all: measure each micro-batch, whatever the scheduler says.

    Attributes:
        stopwatch: has the iterations.
        start_seconds: of learning what the tasks need, by dry runs, and making the first adapters.
    """

    def __init__(self, config: RunConfig, limit: Limit | None = None, *, measure_all: bool = False) -> None:
        self.stopwatch = Stopwatch()
        self._measure_all = measure_all
        self._stack = ExitStack()
        with ExitStack() as unless_made:
            unless_made.push(self._stack)
            self._prepared = self._prepare(config, limit)
            folder = self._prepared.table.folder
            metrics = self._stack.enter_context(folder.take(print))
            folder.write_config(config)
            self._queue = self._stack.enter_context(TaskQueue(folder.queue))
            self._asking = self._stack.enter_context(TaskQueue(folder.queue))
            self._prepared.decisions.begin(self._queue, 0)
            writer = CheckpointWriter(folder.checkpoints, 1, metrics.sync)
            self._stack.enter_context(writer)
            callbacks = Callbacks(config, (), self._prepared.table.reporter)
            self._loop = TrainingLoop(self._prepared, metrics, writer, callbacks)
            self._time(folder)
            unless_made.pop_all()
        self._caught: list[int] = []
        self._left = 0
        self._ask_at = -1

    def _prepare(self, config: RunConfig, limit: Limit | None) -> Prepared:
        """As `mlora.run.prepare.prepare`, but for the limit."""
        base = BaseInfo(config.base_model, config.base_folder)
        builder = TaskBuilder(config, base)
        tasks = [builder.build(adapter) for adapter in config.adapters]
        engine = self._stack.enter_context(make_engine(config, tasks, None, 0))
        memory = limit_memory(config, engine)
        table = TaskTable(engine, builder, tasks, {}, RunFolder(config.output_dir), Reporter(), memory)
        decisions = Decisions(config, table)
        watch = Stopwatch()
        watch.begin()
        if memory is not None and limit is not None:
            memory.limit = limit(memory, tasks)
        decisions.start()
        watch.end()
        self.start_seconds = watch.iterations[0].seconds
        return Prepared(config, base, engine, table, decisions)

    def _time(self, folder: RunFolder) -> None:
        decisions, engine, rounds = self._prepared.decisions, self._prepared.engine, self._loop._rounds
        batches = self._prepared.table
        owners = {"asked": decisions, "next": rounds, "ended": rounds}
        for name in EACH:
            self.stopwatch.time(owners.get(name, batches), name)
        for owner, name in (
            (decisions, "show"),
            (decisions, "decide"),
            (folder, "write_summary"),
            (self._queue, "write_entry"),
        ):
            self.stopwatch.time(owner, name)
        asked, worth, start = decisions.asked, batches.worth_measuring, engine.start

        def begin() -> bool:
            self._begin()
            return asked()

        def enter(inputs: Any, **more: Any) -> Any:
            now = self.stopwatch.iterations[-1]
            now.tasks, now.measured = len(inputs), more["measure"]
            now.rows = sum(len(sample.input_ids) for own in inputs.values() for sample in own)
            self._left -= 1
            return start(inputs, **more)

        decisions.asked = begin  # type: ignore[method-assign]
        engine.start = enter  # type: ignore[method-assign]
        if self._measure_all:
            batches.worth_measuring = lambda chosen: worth(chosen) or True  # type: ignore[method-assign]

    def _begin(self) -> None:
        """Before an iteration: the turn's request and its end."""
        self.stopwatch.end()
        if self._left == 0:
            self._caught.append(0)
        if self._left == self._ask_at:
            self._ask_at = -1
            self._asking.ask("cancel", "nobody")  # there is no such task: a decision, of which nothing comes
        self.stopwatch.begin()

    @property
    def admitted(self) -> int:
        """How many tasks are admitted."""
        return len(self._prepared.table.admission.slots)

    def turn(self, iterations: int, *, decide: bool = True) -> None:
        """Go on for some iterations, with a checkpoint behind them, which is not timed.

        Args:
            iterations: how many; those that decide come on top.
            decide: let somebody ask for something in the middle.
        """
        self._left, self._ask_at = iterations, iterations // 2 if decide else -1
        self._caught = []
        self._loop.train(self._caught)
        self.stopwatch.end()

    def losses(self) -> dict[str, tuple[int, float | None]]:
        """Steps and last loss of each task."""
        found = self._prepared.table.tasks
        return {task.name: (task.progress.step, task.progress.loss) for task in found}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close its files and its engine."""
        self._stack.__exit__(kind, error, trace)
