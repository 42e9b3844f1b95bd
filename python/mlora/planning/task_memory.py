"""What tasks need of memory: their adapters and the micro-batches that their data makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlora.engine.adapter_memory import AdapterMemory
from mlora.engine.memory_limit import AdmissionCandidate
from mlora.objectives.options import START
from mlora.scheduler import MemoryNeed
from mlora.tasks.task import Task
from mlora_ext.interop.read_folder import read_config

LIMIT = "scheduler.memory_limit"  # what a run's messages call it
MOST_LOOKED_AT = 20_000  # micro-batches of a task


class TaskMemory:
    """Tells an `AdapterMemory` of tasks, and remembers their largest micro-batches."""

    def __init__(self, adapters: AdapterMemory) -> None:
        self._adapters = adapters
        self._largest: dict[str, list[int]] = {}

    def know(self, task: Task) -> None:
        """Reads a task's adapter and data; raises ValueError if the adapter cannot be put on the base."""
        lora = task.lora or read_config(Path(str(task.config.init_from)))
        held = [task.data.samples, *([task.eval_data.samples] if task.eval_data else [])]
        if task.objective.takes == "judged":  # a completion may follow the prompt of another sample
            samples = [samples.hollow(row) for samples in held for row in range(len(samples))]
        else:
            samples = [samples.hollow(samples.longest()) for samples in held]
        longest, silent = max(task.lengths(samples)), task.objective.reference is not None
        begins = task.config.init_from if task.objective.reference == START else None
        start = None if begins is None else str(Path(begins).resolve())
        self._adapters.know(task.name, lora, task.optim, longest, silent=silent, start=start)

    def need(self, task: Task, arrival: int) -> MemoryNeed:
        """Returns the scheduler's view of a known task; see `memory_need`."""
        return memory_need(task, arrival, self._adapters.admitted(task.name), self.candidate(task).largest)

    def candidate(self, task: Task) -> AdmissionCandidate:
        """Returns a known task as an engine's memory limit sees it."""
        size = partial(self._adapters.size, task.name)
        largest = self._largest.get(task.name)
        if largest is None:
            largest = largest_lengths(task, size)
            if size(largest):  # 0 while nothing is known yet
                self._largest[task.name] = largest
        return AdmissionCandidate(
            task.name, largest, lambda count: largest_lengths(with_batches_of(task, count), size)
        )


def memory_need(
    task: Task, arrival: int, states: Sequence[int] = (), largest: Sequence[int] = ()
) -> MemoryNeed:
    """Returns the scheduler's view of a task; `arrival` is its index in the order in which tasks came.

    Its last steps count as full. Without a memory limit nobody reads `states` (bytes at each stage) and
    `largest`.
    """
    usual = tuple(task.usual_lengths)
    batches = (task.total_steps - task.progress.step) * task.plan.accumulation
    work = float(sum(usual) * max(batches, 0))
    return MemoryNeed(task.name, task.config.priority, arrival, work, tuple(states), usual, tuple(largest))


def with_batches_of(task: Task, count: int) -> Task:
    """Returns a task with another ``per_device_train_batch_size``; only its lengths are of use."""
    plan = replace(task.plan, batch_size=count)
    config = task.config
    total = config.max_steps if config.max_steps > 0 else plan.steps_of(config.num_train_epochs)
    return replace(task, plan=plan, total_steps=total)


def largest_lengths(task: Task, size: Callable[[Sequence[int]], float]) -> list[int]:
    """Returns the sequence lengths of the largest micro-batch of a task's whole run, by `size`.

    Memory grows only with rows and squares of rows, so the micro-batches with the most of either are
    compared. A task with more than `MOST_LOOKED_AT` micro-batches gets its longest samples, which none
    exceeds. An evaluation can be cut down to single samples, so its longest sample counts.
    """
    samples = task.data.samples
    order = samples.by_rows(longest_first=True)
    count = task.plan.batch_size
    if task.plan.shuffle:
        count = min(count, len(order))
    found = [task.lengths([samples.hollow(order[place % len(order)]) for place in range(count)])]
    batches = task.total_steps * task.plan.accumulation
    if batches <= MOST_LOOKED_AT and samples.hollow(order[0]).rows != samples.hollow(order[-1]).rows:
        every = [task.lengths_of(batch) for batch in range(batches)]
        found = [max(every, key=sum), max(every, key=lambda own: sum(length * length for length in own))]
    if task.eval_data is not None:
        held = task.eval_data.samples
        cut = task.objective.takes == "judged"  # a batch of them is one sample
        most = held.by_rows(longest_first=True)[: task.config.per_device_eval_batch_size if cut else 1]
        found.append(task.lengths([held.hollow(row) for row in most]))
    return max(found, key=size)
