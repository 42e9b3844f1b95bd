"""What the scheduler knows of a task, and of the memory that tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryNeed:
    """What a task asks for. Sequence lengths are in rows, sizes in bytes.

    Each stage of a pipeline is a memory of its own, such as a device.

    Args:
        name: of the task.
        priority: a higher one goes first.
        arrival: a number that grows from task to task in the order in which they come.
        work: rows still to train.
        states: bytes at each stage while the task is admitted: weights, optimizer moments, kept gradients.
        usual: sequence lengths of a usual micro-batch.
        largest: sequence lengths of the largest micro-batch still to come.
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
    """The memory that tasks may use together.

    Args:
        free: bytes at each stage for states and activations; None = no limit.
        held: micro-batches whose activations each stage holds at once while all slots are in use.
    """

    free: tuple[int, ...] | None = None
    held: tuple[int, ...] = (1,)

    def budget(self, states: Sequence[int], slots: int) -> tuple[float, ...]:
        """Returns the bytes that one micro-batch may use at each stage, if there is a limit.

        `states` are the bytes of all admitted tasks' states at each stage. If they alone are too much, the
        result is negative.
        """
        assert self.free is not None
        return tuple(
            (free - used) / min(held, slots)
            for free, used, held in zip(self.free, states, self.held, strict=True)
        )


def within(sizes: Sequence[float], budget: Sequence[float]) -> bool:
    """Whether sizes are at most a budget at each stage."""
    return all(size <= most for size, most in zip(sizes, budget, strict=True))


def sum_of(states: Sequence[Sequence[int]], places: int) -> tuple[int, ...]:
    """Adds sizes up, stage by stage."""
    return tuple(sum(state[place] for state in states) for place in range(places))
