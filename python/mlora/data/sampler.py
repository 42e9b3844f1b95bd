"""Which samples each micro-batch holds: depends only on the seed and the micro-batch's index."""

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

    With `shuffle`, an epoch ends as in Transformers' ``Trainer``: its last micro-batch holds the samples that
    are left, and its last optimizer step the micro-batches that are left. In file order, batches are always
    full and wrap around the file's end. Only the order of the epoch asked for last is kept in memory.
    """

    samples: int  # number of samples
    batch_size: int  # samples of a micro-batch
    accumulation: int  # micro-batches of an optimizer step
    shuffle: bool  # a new order each epoch, or the file's order
    seed: int  # the orders derive from it
    _epoch: int = field(default=-1, init=False, repr=False, compare=False)
    _order: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def batches_per_epoch(self) -> int:
        """Micro-batches of an epoch, the last one counted whole."""
        return math.ceil(self.samples / self.batch_size)

    def batch(self, index: int) -> list[int]:
        """Returns the indices of the samples of micro-batch `index`, counted from 0."""
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
        """Whether an optimizer step follows micro-batch `index`, counted from 0."""
        if not self.shuffle:
            return (index + 1) % self.accumulation == 0
        place = index % self.batches_per_epoch + 1
        return place % self.accumulation == 0 or place == self.batches_per_epoch

    def steps_of(self, epochs: float) -> int:
        """Returns the number of optimizer steps of `epochs`, which may be a fraction.

        Shuffled: ``ceil(epochs x steps per epoch)``, as in ``Trainer``. In file order: as many steps as it
        takes to see ``epochs x samples`` samples.
        """
        if not self.shuffle:
            return math.ceil(epochs * self.samples / (self.batch_size * self.accumulation))
        return math.ceil(epochs * math.ceil(self.batches_per_epoch / self.accumulation))


def epoch_order(samples: int, seed: int, epoch: int) -> Tensor:
    """Returns the order of samples in an epoch, counted from 0: a permutation, int64."""
    import torch

    generator = torch.Generator("cpu").manual_seed(task_seed(seed, f"epoch {epoch}"))
    return torch.randperm(samples, generator=generator, device="cpu")


def task_seed(seed: int, name: str) -> int:
    """Returns a seed that depends on a seed and a name only: 63 bits of the SHA-256 of both."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
