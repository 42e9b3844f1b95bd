"""What tasks need of memory: their adapters and the micro-batches that their data makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlora.memory.adapter_memory import AdapterMemory
from mlora.objectives.options import START
from mlora.scheduler import MemoryNeed
from mlora.tasks.task import Task
from mlora_ext.interop.read_folder import read_config

LIMIT = "scheduler.memory_limit"  # what a run's messages call it
MOST_LOOKED_AT = 20_000  # micro-batches of a task


def know_task(adapters: AdapterMemory, task: Task) -> None:
    """Tells `adapters` of a task and its data; raises ValueError if its adapter cannot be put on the base."""
    lora = task.lora or read_config(Path(str(task.config.init_from)))
    held = [task.data.samples, *([task.eval_data.samples] if task.eval_data else [])]
    if task.objective.takes == "judged":  # a completion may follow the prompt of another sample
        samples = [samples.hollow(row) for samples in held for row in range(len(samples))]
    else:
        samples = [samples.hollow(samples.longest()) for samples in held]
    longest, silent = max(task.lengths(samples)), task.objective.reference is not None
    begins = task.config.init_from if task.objective.reference == START else None
    start = None if begins is None else str(Path(begins).resolve())
    batches = partial(largest_lengths, task)
    adapters.know(task.name, lora, task.optim, longest, silent=silent, start=start, batches=batches)


def memory_need(task: Task, arrival: int, adapters: AdapterMemory | None = None) -> MemoryNeed:
    """Returns the scheduler's view of a task; `arrival` is its index in the order in which tasks came.

    Its last steps count as full. Without a memory limit (`adapters`) nobody reads what it needs.
    """
    states: Sequence[int] = ()
    largest: Sequence[int] = ()
    if adapters is not None:
        states, largest = adapters.admitted(task.name), adapters.largest(task.name)
    usual = tuple(task.usual_lengths)
    batches = (task.total_steps - task.progress.step) * task.plan.accumulation
    work = float(sum(usual) * max(batches, 0))
    return MemoryNeed(task.name, task.config.priority, arrival, work, tuple(states), usual, tuple(largest))


def largest_lengths(
    task: Task, size: Callable[[Sequence[int]], float], batch_size: int | None = None
) -> list[int]:
    """Returns the sequence lengths of the largest micro-batch of a task's whole run, by `size`.

    Memory grows only with rows and squares of rows, so the micro-batches with the most of either are
    compared. A task with more than `MOST_LOOKED_AT` micro-batches gets its longest samples, which none
    exceeds. An evaluation can be cut down to single samples, so its longest sample counts. `batch_size` takes
    the place of ``per_device_train_batch_size``.
    """
    if batch_size is not None:
        plan, config = replace(task.plan, batch_size=batch_size), task.config
        total = config.max_steps if config.max_steps > 0 else plan.steps_of(config.num_train_epochs)
        task = replace(task, plan=plan, total_steps=total)
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
