"""What the scheduler knows of a task, and of the memory that tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryNeed:
    """What a task asks for. Sequence lengths are in rows, sizes in bytes; a *place* is a memory of its own,
    such as a device: each stage of a pipeline has one.

    Args:
        name: of the task.
        priority: a higher one goes first.
        arrival: a number that grows from task to task as they come.
        work: rows that it has yet to train.
        states: bytes at each place while it is admitted: weights, optimizer's moments, kept gradients.
        usual: sequence lengths of a usual micro-batch.
        largest: those of the largest one that is still to come.
    """

    name: str
    priority: int
    arrival: int
    work: float
    states: tuple[int, ...]
    usual: tuple[int, ...]
    largest: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of a usual micro-batch."""
        return sum(self.usual)


@dataclass(frozen=True)
class Room:
    """What tasks may use together.

    Args:
        free: bytes at each place for states and activations; none = no limit.
        held: micro-batches whose activations each place holds at once, where all slots are in use.
    """

    free: tuple[int, ...] | None = None
    held: tuple[int, ...] = (1,)

    def budget(self, states: Sequence[int], slots: int) -> tuple[float, ...]:
        """What one micro-batch may use.

        Args:
            states: bytes that the states of all admitted tasks take at each place.
            slots: in use.

        Returns:
            Bytes at each place; infinite without a limit, negative where states alone are too much.
        """
        if self.free is None:
            return (float("inf"),) * len(self.held)
        return tuple(
            (free - used) / min(held, slots)
            for free, used, held in zip(self.free, states, self.held, strict=True)
        )


def within(sizes: Sequence[float], budget: Sequence[float]) -> bool:
    """Say whether sizes are at most a budget, at each place."""
    return all(size <= most for size, most in zip(sizes, budget, strict=True))


def sum_of(states: Sequence[Sequence[int]], places: int) -> tuple[int, ...]:
    """Add sizes up, place by place."""
    return tuple(sum(state[place] for state in states) for place in range(places))
