"""What the scheduler is told of a task: lengths of its micro-batches, and work that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mlora.data.record import sequence_lengths
from mlora.scheduler import MemoryNeed
from mlora.tasks.task import Task

MOST_LOOKED_AT = 20_000  # micro-batches to come


def memory_need(
    task: Task, arrival: int, states: Sequence[int] = (), largest: Sequence[int] = ()
) -> MemoryNeed:
    """Say what a task needs.

    Args:
        task: with its data.
        arrival: its place among all tasks of the run, as they came.
        states: bytes of its states at each place.
        largest: of `largest_lengths`; where there is no limit, nobody asks.

    Returns:
        The scheduler's view of it.
    """
    usual = task.usual_lengths
    left = sum(usual) * max(batches_left(task), 0)
    return MemoryNeed(
        task.name, task.config.priority, arrival, float(left), tuple(states), tuple(usual), tuple(largest)
    )


def batches_left(task: Task) -> int:
    """Return how many micro-batches a task has still to take, about: its last steps are counted as full.

    Args:
        task: with its plan.
    """
    return (task.total_steps - task.progress.step) * task.plan.accumulation


def with_batches_of(task: Task, count: int) -> Task:
    """Return a task as it would be with another ``per_device_train_batch_size``, for its lengths.

    Args:
        task: with its data.
        count: samples of a micro-batch.
    """
    plan = replace(task.plan, batch_size=count)
    config = task.config
    total = config.max_steps if config.max_steps > 0 else plan.steps_of(config.num_train_epochs)
    return replace(task, plan=plan, total_steps=total)


def largest_lengths(task: Task, size: Callable[[Sequence[int]], float]) -> list[int]:
    """Return the sequence lengths of the largest micro-batch that a task takes in all of its run.

    That of the most rows or that of the most squares of rows: memory grows with both and nothing else.

    Args:
        task: with its data.
        size: of a micro-batch.

    Returns:
        Those of the largest of its micro-batches; of a task with very many, those of its longest samples,
        which none exceeds. An evaluation may be cut, but not into less than a sample.
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
