"""A real training run that goes on in turns, with the scheduler's calls timed inside of it.

It trains small random models in a folder, and tasks of random tokens.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from mlora.config.config_file import resolve_config
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
from shared.shapes import ALL_LINEAR, ModelShape, random_llama
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

KINDS: tuple[dict[str, Any], ...] = (
    {"r": 8, "lora_dropout": 0.1, "target_modules": list(ALL_LINEAR)},
    {"r": 16, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    {"r": 4, "target_modules": list(ALL_LINEAR)},
)
"""Adapters of tasks in turn: three kinds, which make mixtures of their own."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    Attributes:
        hidden: D.
        blocks: decoder blocks.
        vocabulary: tokens.
        window: of every layer's attention; none = the whole sequence.
    """

    hidden: int
    blocks: int = 6
    vocabulary: int = 8000
    window: int | None = None

    @property
    def name(self) -> str:
        """Such as `hidden 256` or `hidden 256, window 48`."""
        return f"hidden {self.hidden}" + (f", window {self.window}" if self.window else "")

    def make(self) -> PreTrainedModel:
        """A random model, the same for the same sizes."""
        shape = ModelShape(
            self.hidden,
            intermediate=11 * self.hidden // 4,
            heads=max(1, self.hidden // 64),
            kv_heads=max(1, self.hidden // 128),
            layers=self.blocks,
            vocabulary=self.vocabulary,
        )
        if not self.window:
            return random_llama(shape, max_position_embeddings=4096)
        torch.manual_seed(0)
        options = shape.options | {"max_position_embeddings": 4096, "sliding_window": self.window}
        return MistralForCausalLM(MistralConfig(**options))


@dataclass(frozen=True)
class Work:
    """What tasks train; each has samples of its own.

    Attributes:
        tasks: how many.
        batch: sequences of a micro-batch.
        shortest: rows of a sequence at least.
        longest: and at most, evenly spread between.
        steps: of each task.
        samples: of each task.
    """

    tasks: int
    batch: int
    shortest: int
    longest: int
    steps: int
    samples: int = 256


def make_config(
    base: Path, out: Path, work: Work, *, limit: int | None, checkpointing: bool = False
) -> RunConfig:
    """A run's config; its data sets are written beside `out`.

    Args:
        base: folder of the base model.
        out: the run's folder, which need not be there.
        work: what the tasks train.
        limit: on memory, in bytes; none = there is none.
        checkpointing: `gradient_checkpointing`.

    Returns:
        The config, of tasks `t0`, `t1` and so on, whose last steps nobody is meant to reach.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    names = [f"t{number}" for number in range(work.tasks)]
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    for number, name in enumerate(names):
        lines = [json.dumps({"input_ids": ids}) for ids in token_rows(work, vocabulary, seed=number)]
        (out.parent / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "base_model": str(base),
        "output_dir": str(out),
        "device": "cpu",
        "gradient_checkpointing": checkpointing,
        "defaults": {
            "max_steps": work.steps,
            "per_device_train_batch_size": work.batch,
            "save_steps": None,
            "learning_rate": 1e-4,
        },
        "datasets": [{"name": name, "path": f"{name}.jsonl", "format": "tokens"} for name in names],
        "adapters": [
            {"name": name, "dataset": name, "lora": KINDS[number % len(KINDS)]}
            for number, name in enumerate(names)
        ],
        "scheduler": {"memory_limit": limit},
    }
    return resolve_config(data, folder=out.parent)


def token_rows(work: Work, vocabulary: int, seed: int) -> list[list[int]]:
    """Random ids of a task's samples, the longest length among them."""
    draw = random.Random(seed)
    lengths = [work.longest, *(draw.randint(work.shortest, work.longest) for _ in range(work.samples - 1))]
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def random_lengths(count: int, work: Work, seed: int, names: Sequence[str]) -> list[dict[str, list[int]]]:
    """Micro-batches of sequences of random lengths, every fourth one of equally long sequences.

    Args:
        count: of micro-batches.
        work: lengths from its shortest to its longest, one sequence to `batch` ones of a task.
        seed: of the draw.
        names: the tasks, all of which take part in each.
    """
    draw = random.Random(seed)
    found = []
    for place in range(count):
        same = draw.randint(work.shortest, work.longest)
        found.append(
            {
                name: [
                    same if place % 4 == 3 else draw.randint(work.shortest, work.longest)
                    for _ in range(draw.randint(1, work.batch))
                ]
                for name in names
            }
        )
    return found


Clock = Callable[[], float]
EACH = ("asked", "next", "next_batch", "worth_measuring", "passed", "ended")
"""Calls of each iteration."""
DECISION = ("decide", "write_summary")
DECISIONS_EVERY = 25
"""Iterations for each decision: as many as there are where 64 tasks of 1600 steps each end one by one."""
MEASURED_EVERY = 256
"""Of this many micro-batches of a mixture one is measured, when the first ones have been."""


@dataclass
class Iteration:
    """One iteration.

    Attributes:
        begin: when it began, in seconds.
        seconds: until the next one began.
        rows: that were trained.
        tasks: that took part.
        measured: whether its memory was.
        calls: seconds of the calls inside, by name.
    """

    begin: float
    seconds: float = 0.0
    rows: int = 0
    tasks: int = 0
    measured: bool = False
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def is_step(self) -> bool:
        """Whether a batch was trained, and nothing decided."""
        return self.tasks > 0 and "decide" not in self.calls


class Stopwatch:
    """Times methods of single objects, by iterations.

    Attributes:
        iterations: those that have begun.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.iterations: list[Iteration] = []
        self._clock = clock
        self._now: Iteration | None = None

    def begin(self) -> None:
        """End the present iteration, and begin the next one."""
        self.end()
        self._now = Iteration(self._clock())
        self.iterations.append(self._now)

    def end(self) -> None:
        """End the present iteration; nothing outside of one is counted."""
        if self._now is not None:
            self._now.seconds = self._clock() - self._now.begin
        self._now = None

    def time(self, owner: Any, method: str) -> None:
        """Let an object's method be timed from now on; its class stays as it is."""
        run = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = self._clock()
            try:
                return run(*arguments, **named)
            finally:
                self._count(method, self._clock() - begin)

        setattr(owner, method, timed)

    def _count(self, name: str, seconds: float) -> None:
        if self._now is not None:
            self._now.calls[name] = self._now.calls.get(name, 0.0) + seconds


def overhead(iterations: Sequence[Iteration], measuring: float) -> dict[str, Any]:
    """What the scheduler takes of a step.

    Calls of each iteration count by their means. Those of the step after a decision take longer, since what
    was remembered is asked for anew; what they take more counts as often as there are decisions. `show`
    publishes by the clock, every few seconds. Decisions count by their median.

    Args:
        iterations: of a run.
        measuring: what measuring adds to a step, as a share of it.

    Returns:
        `step_seconds`, the median; `seconds` of each call, `decision_seconds` and its `decision_parts`; as
        shares of a step `shares` of each piece, and their sum `share`.

    Raises:
        ValueError: there is no step, or no decision.
    """
    after = {id(one) for before, one in pairwise(iterations) if "decide" in before.calls}
    steps = [one for one in iterations if one.is_step]
    steps = [one for one in steps if not one.measured] or steps  # a mixture may still be learned
    decisions = [one for one in iterations if "decide" in one.calls]
    if not steps or not decisions:
        raise ValueError(f"iterations: expected steps and decisions, got {len(steps)} and {len(decisions)}")
    step = statistics.median(one.seconds for one in steps)
    first = [one for one in steps if id(one) in after]
    others = [one for one in steps if id(one) not in after] or steps
    seconds = {name: mean_of(others, name) for name in EACH}
    more = {name: max(0.0, mean_of(first, name) - seconds[name]) for name in EACH} if first else {}
    seconds = {name: value + more.get(name, 0.0) / DECISIONS_EVERY for name, value in seconds.items()}
    seconds["show"] = mean_of(steps, "show")
    decision = statistics.median(sum(one.calls.get(name, 0.0) for name in DECISION) for one in decisions)
    shares = {name: value / step for name, value in seconds.items()}
    shares["decisions"] = decision / DECISIONS_EVERY / step
    shares["measuring"] = measuring / MEASURED_EVERY
    return {
        "steps": len(steps),
        "step_seconds": step,
        "tasks_of_a_step": statistics.median(one.tasks for one in steps),
        "rows_of_a_step": statistics.median(one.rows for one in steps),
        "seconds": seconds,
        "worst_seconds": {name: max(one.calls.get(name, 0.0) for one in steps) for name in (*EACH, "show")},
        "decisions": len(decisions),
        "decision_seconds": decision,
        "decision_parts": {name: median_of(decisions, name) for name in (*DECISION, "write_entry")},
        "iterations_for_each_decision": DECISIONS_EVERY,
        "measuring_of_a_measured_step": measuring,
        "shares": shares,
        "share": sum(shares.values()),
    }


def mean_of(iterations: Sequence[Iteration], name: str) -> float:
    """Mean seconds of a call; 0 where an iteration had none."""
    return statistics.fmean(one.calls.get(name, 0.0) for one in iterations)


def median_of(iterations: Sequence[Iteration], name: str) -> float:
    """Median seconds of a call; 0 where an iteration had none."""
    return statistics.median(one.calls.get(name, 0.0) for one in iterations)


def ratios(turns: Mapping[str, Sequence[Sequence[Iteration]]], over: str, under: str) -> dict[str, float]:
    """Seconds of one run's steps over another's, step by step of the same turns, which train the same rows.

    Returns:
        The `median` of the ratios, and their interquartile range as `spread`.

    Raises:
        ValueError: two steps are not of the same rows.
    """
    found = []
    for one, other in zip(turns[over], turns[under], strict=True):
        mine, theirs = ([each for each in turn if each.is_step] for turn in (one, other))
        for a, b in zip(mine, theirs, strict=False):
            if a.rows != b.rows:
                raise ValueError(
                    f"{over}, {under}: expected steps of the same rows, got {a.rows} and {b.rows}"
                )
            found.append(a.seconds / b.seconds)
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"median": middle, "spread": high - low, "steps": len(found)}


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
        """Go on for some iterations, with a checkpoint behind them, which is not timed."""
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
