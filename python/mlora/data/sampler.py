"""Which samples each micro-batch holds: a function of the seed and of how many came before."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class BatchPlan:
    """The micro-batches of one task and the optimizer steps that they make.

    Shuffled, an epoch ends as it does in Transformers' ``Trainer``: its last micro-batch holds what is left,
    and its last optimizer step holds the micro-batches that are left. In file order, batches are always full
    and wrap around the file's end. The order of one epoch is kept, the one asked for last.

    Args:
        samples: number of samples.
        batch_size: samples of a micro-batch.
        accumulation: micro-batches of an optimizer step.
        shuffle: a new order each epoch, or the file's order.
        seed: what the orders derive from.
    """

    samples: int
    batch_size: int
    accumulation: int
    shuffle: bool
    seed: int
    _epoch: int = field(default=-1, init=False, repr=False, compare=False)
    _order: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of an epoch, the last one counted whole."""
        return math.ceil(self.samples / self.batch_size)

    def batch(self, index: int) -> list[int]:
        """Return the samples of a micro-batch.

        Args:
            index: how many micro-batches came before.

        Returns:
            Indices of samples.
        """
        if not self.shuffle:
            start = index * self.batch_size
            return [position % self.samples for position in range(start, start + self.batch_size)]
        epoch, place = divmod(index, self.batches_per_epoch)
        if self._order is None or epoch != self._epoch:
            self._epoch, self._order = epoch, epoch_order(self.samples, self.seed, epoch)
        start = place * self.batch_size
        rows: list[int] = self._order[start : min(start + self.batch_size, self.samples)].tolist()
        return rows

    def ends_step(self, index: int) -> bool:
        """Say whether an optimizer step follows a micro-batch.

        Args:
            index: how many micro-batches came before.

        Returns:
            True when the accumulation is complete after this micro-batch.
        """
        if not self.shuffle:
            return (index + 1) % self.accumulation == 0
        place = index % self.batches_per_epoch + 1
        return place % self.accumulation == 0 or place == self.batches_per_epoch

    def steps_of(self, epochs: float) -> int:
        """Return the number of optimizer steps of some epochs.

        Args:
            epochs: may be a fraction.

        Returns:
            ``ceil(epochs x steps per epoch)`` as in ``Trainer`` when shuffled; in file order, as many steps
            as it takes to see ``epochs x samples`` samples.
        """
        if not self.shuffle:
            return math.ceil(epochs * self.samples / (self.batch_size * self.accumulation))
        return math.ceil(epochs * math.ceil(self.batches_per_epoch / self.accumulation))


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """Return the order of samples in one epoch.

    Args:
        samples: how many there are.
        seed: the task's seed.
        epoch: counted from 0.

    Returns:
        A permutation of ``range(samples)``, int64.
    """
    import torch

    generator = torch.Generator().manual_seed(task_seed(seed, f"epoch {epoch}"))
    return torch.randperm(samples, generator=generator)


def task_seed(seed: int, name: str) -> int:
    """Return a seed that depends on a seed and a name only.

    Args:
        seed: for example the run's.
        name: for example an adapter's.

    Returns:
        63 bits of the SHA-256 of both.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
