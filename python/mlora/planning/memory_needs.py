"""What the scheduler is told of a task: lengths of its micro-batches, and the work left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlora.data.record import sequence_lengths
from mlora.scheduler import MemoryNeed
from mlora.tasks.task import Task

MOST_LOOKED_AT = 20_000  # micro-batches of a task


def memory_need(
    task: Task, arrival: int, states: Sequence[int] = (), largest: Sequence[int] = ()
) -> MemoryNeed:
    """Returns the scheduler's view of a task; `arrival` is its index in the order in which tasks came.

    Without a memory limit nobody reads `states` (bytes at each stage) and `largest`.
    """
    usual = task.usual_lengths
    left = sum(usual) * max(batches_left(task), 0)
    return MemoryNeed(
        task.name, task.config.priority, arrival, float(left), tuple(states), tuple(usual), tuple(largest)
    )


def batches_left(task: Task) -> int:
    """Returns about how many micro-batches a task has still to take; counts its last steps as full."""
    return (task.total_steps - task.progress.step) * task.plan.accumulation


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
    samples = sorted(task.data.samples, key=lambda sample: -sample.rows)
    count = task.plan.batch_size
    if task.plan.shuffle:
        count = min(count, len(samples))
    found = [sequence_lengths((samples * -(-count // len(samples)))[:count])]
    batches = task.total_steps * task.plan.accumulation
    if batches <= MOST_LOOKED_AT and samples[0].rows != samples[-1].rows:
        every = [task.lengths_of(batch) for batch in range(batches)]
        found = [max(every, key=sum), max(every, key=lambda own: sum(length * length for length in own))]
    if task.eval_data is not None:
        found.append(sequence_lengths([max(task.eval_data.samples, key=lambda sample: sample.rows)]))
    return max(found, key=size)
