"""A micro-batch on its way from packing to the last stage, and what comes back.

Letters: T rows, M of them with a label, N owners of rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mlora.memory.model import SilentRows
from mlora.model.attention import PackedSequences
from mlora.optim.step_rule import Update
from mlora.records import record
from mlora_ext import SegmentLayout

BASE = "__base__"


@record
@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of several owners, one after the other. Each owner's are contiguous.

    Attributes:
        names: owners of the rows, in order; `__base__` owns rows without an adapter.
        lengths: rows of each owner.
        row0: rows that each owner has already seen in its current optimizer step.
        sequences: rows of each sequence.
        trained: of each owner, how many rows of each of its sequences have a label.
        rows: `[M]` int32 on the CPU, the rows with a label, in order.
        targets: `[M]` int32 on the CPU, their labels: the token to predict from each. None for prompts, whose
            next tokens are asked for.
        input_ids: `[1, T]` int64; None behind the first stage.
    """

    names: Sequence[str]
    lengths: Sequence[int]
    row0: Sequence[int]
    sequences: Sequence[int]
    trained: Sequence[Sequence[int]]
    rows: Tensor
    targets: Tensor | None
    input_ids: Tensor | None

    @property
    def adapters(self) -> list[str]:
        """The owners that are adapters."""
        return [name for name in self.names if name != BASE]

    @property
    def layout(self) -> SegmentLayout:
        """The rows of each of `adapters`."""
        order = {name: index for index, name in enumerate(self.adapters)}
        return SegmentLayout.from_lengths(self.lengths, [order.get(n, -1) for n in self.names], self.row0)

    def places(self, device: torch.device | str) -> tuple[Tensor, PackedSequences]:
        """Returns `position_ids` `[1, T]` int64, from 0 in each sequence, and the sequences for attention."""
        positions = [torch.arange(length, device="cpu") for length in (0, *self.sequences)]
        sequences = PackedSequences.of(tuple(self.sequences), device)
        return torch.cat(positions).unsqueeze(0).to(device), sequences

    @property
    def counts(self) -> list[int]:
        """How many of `rows` each owner has."""
        return [sum(own) for own in self.trained]


@record
@dataclass(frozen=True, eq=False)
class Observation:
    """What of a micro-batch an adapter's initialisation looks at.

    Attributes:
        name: the adapter's.
        rows: which rows count; None: all.
        share: weight of their gradients.
    """

    name: str
    rows: Sequence[bool] | None
    share: float


@record
@dataclass(frozen=True, eq=False)
class MicroBatch(PackedRows):
    """One micro-batch of several adapters. `pack` makes it, `Batcher` says what goes with it.

    Attributes:
        units: the divisor of each adapter's loss, as its objective gives it; without an entry, its count.
        faults: of each adapter whose objective could not give it.
        facts: of each owner, those of its samples.
        silent: rows that are run without gradient, or None.
        reads: for each owner, the sequences of `silent` that its loss reads, by index.
        steps: dropout step of each adapter.
        scales: of each owner, the factor on its loss where that is differentiated.
        objectives: of each owner what its objective is made of; None: cross-entropy for all.
        updates: what is to be done with gradients before the forward pass, by adapter.
        planned: updates that each Parameter gets as soon as its gradient is there, by task of full tuning.
        ends: adapters whose accumulation is complete after it.
        measure: a number, if its memory is measured.
        start: see `Observation`.
    """

    units: dict[str, int] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    facts: Sequence[Sequence[Sequence[float]]] = ()
    silent: PackedRows | None = None
    reads: Sequence[Sequence[int]] = ()
    steps: Sequence[int] = ()
    scales: Sequence[float] = ()
    objectives: Sequence[Any] | None = None
    updates: Mapping[str, Update] = field(default_factory=dict)
    planned: Mapping[str, Update] = field(default_factory=dict)
    ends: Sequence[str] = ()
    measure: int | None = None
    start: Observation | None = None

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """Rows of each sequence, with and without gradient; see `mlora.data.record.sequence_lengths`."""
        silent = () if self.silent is None else self.silent.sequences
        return (*self.sequences, *map(SilentRows, silent))

    @property
    def all_owners(self) -> list[str]:
        """The adapters whose weights it uses, those with gradient first."""
        silent = () if self.silent is None else self.silent.names
        return [name for name in dict.fromkeys((*self.names, *silent)) if name != BASE]

    def for_next(self) -> MicroBatch:
        """Returns what stages behind the first need of it."""
        silent = None if self.silent is None else replace(self.silent, input_ids=None)
        return replace(self, input_ids=None, silent=silent, units={}, faults={})


@record
@dataclass(frozen=True, eq=False)
class MicroBatchResult:
    """What the last stage reports of a micro-batch.

    Attributes:
        losses: `[N]` fp64, the sum of each owner's losses; None for prompts.
        metrics: of each owner, sums and what divides them by name.
        faults: of each owner, why its objective failed; empty if it did not.
        next_tokens: `[M]`, the most likely next tokens of prompts.
    """

    losses: Tensor | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    faults: Sequence[str] = ()
    next_tokens: Tensor | None = None


@record
@dataclass(frozen=True, eq=False)
class StageNote:
    """What a stage reports of a micro-batch after its backward.

    Attributes:
        squares: sum of the squares of complete gradients, by adapter.
        failed: why optimizers have failed, by adapter.
        peak_memory: the most bytes that the stage has used.
        used_memory: bytes in use now.
        memory: measured bytes of forward, loss and backward; None: not measured.
    """

    squares: Mapping[str, Tensor | float]
    failed: Mapping[str, str]
    peak_memory: int
    used_memory: int
    memory: Sequence[int] | None = None
