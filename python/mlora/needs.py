"""What the scheduler is told of a task: lengths of its micro-batches, and work that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlora.scheduler import Need
from mlora.tasks import Task

MOST_LOOKED_AT = 20_000  # micro-batches to come


def need_of(
    task: Task, arrival: int, states: Sequence[int], size: Callable[[Sequence[int]], float] | None
) -> Need:
    """Say what a task needs.

    Args:
        task: with its data.
        arrival: its place among all tasks of the run, as they came.
        states: bytes of its states at each place.
        size: of a micro-batch, by its sequence lengths; the largest one is what counts. None = nobody asks.

    Returns:
        The scheduler's view of it.
    """
    usual = usual_lengths(task)
    left = sum(usual) * max(batches_left(task), 0)
    return Need(
        task.name,
        task.config.priority,
        arrival,
        float(left),
        tuple(states),
        tuple(usual),
        tuple(usual if size is None else largest_lengths(task, size)),
    )


def usual_lengths(task: Task) -> list[int]:
    """Return the sequence lengths of a micro-batch that stands for the task's data: evenly spaced quantiles.

    Args:
        task: with its data.
    """
    lengths = sorted(len(sample.input_ids) for sample in task.data.samples)
    batch = min(task.plan.batch_size, len(lengths)) if task.plan.shuffle else task.plan.batch_size
    return [lengths[(2 * place + 1) * len(lengths) // (2 * batch)] for place in range(batch)]


def batches_left(task: Task) -> int:
    """Return how many micro-batches a task has still to take, about: its last steps are counted as full.

    Args:
        task: with its plan.
    """
    return (task.total_steps - task.progress.step) * task.plan.accumulation


def largest_lengths(task: Task, size: Callable[[Sequence[int]], float]) -> list[int]:
    """Return the sequence lengths of the largest micro-batch that a task may still take.

    Args:
        task: with its data.
        size: of a micro-batch.

    Returns:
        Those of the largest of the micro-batches to come; of a task with very many, and for evaluation, those
        of its longest samples, which no micro-batch exceeds.
    """
    longest = _longest(task.data.samples, task.plan.batch_size)
    found = longest
    left = batches_left(task)
    if 0 < left <= MOST_LOOKED_AT and len(set(map(len, (s.input_ids for s in task.data.samples)))) > 1:
        begin = task.progress.batches
        found = max((task.lengths_of(batch) for batch in range(begin, begin + left)), key=size)
    if task.eval_data is not None:  # evaluation may be cut, but not into less than a sample
        evaluated = _longest(task.eval_data.samples, 1)
        found = max(found, evaluated, key=size)
    return found


def _longest(samples: Sequence[object], count: int) -> list[int]:
    lengths = sorted((len(sample.input_ids) for sample in samples), reverse=True)  # type: ignore[attr-defined]
    return lengths[:count] if count <= len(lengths) else [*lengths, *lengths[: count - len(lengths)]]
