"""Packs samples of several adapters into rows, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mlora.data.record import NOT_TRAINED, Sample
from mlora.memory.memory_model import SilentRows
from mlora.model.attention import PackedSequences
from mlora.objectives.options import START, owner_of
from mlora_ext import SegmentLayout

BASE = "__base__"


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Which adapter and sample the T rows of a micro-batch belong to; every stage needs it."""

    names: tuple[str, ...]  # owners of the rows, in order; `__base__` owns rows without an adapter
    adapters: tuple[str, ...]  # `names` without `__base__`, in the order of `layout`'s indices
    layout: SegmentLayout  # rows of each owner
    sequences: PackedSequences  # rows of each sample
    position_ids: Tensor  # `[1, T]` int64, from 0 in each sample

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        lengths: Sequence[int],
        row0: Sequence[int],
        sequences: Sequence[int],
        device: torch.device | str,
    ) -> PackedRows:
        """Builds it from plain numbers, which mean the same as in `PackedBatch`."""
        adapters = tuple(name for name in names if name != BASE)
        order = {name: index for index, name in enumerate(adapters)}
        layout = SegmentLayout.from_lengths(lengths, [order.get(name, -1) for name in names], row0)
        positions = [torch.arange(length, device="cpu") for length in (0, *sequences)]
        return cls(
            tuple(names),
            adapters,
            layout,
            PackedSequences.of(tuple(sequences), device),
            torch.cat(positions).unsqueeze(0).to(device),
        )


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch of several adapters, as the first stage gets it. Each adapter's rows are contiguous."""

    names: tuple[str, ...]  # owners of the rows, in order; `__base__` owns rows without an adapter
    lengths: tuple[int, ...]  # rows of each owner
    row0: tuple[int, ...]  # rows that each owner has already seen in its current optimizer step
    sequences: tuple[int, ...]  # rows of each sample
    input_ids: Tensor  # `[1, T]` int64
    rows: Tensor  # `[M]` int32 on the CPU, the rows with a label, in order
    # `[M]` int32 on the CPU, their labels: the token to predict from each. None for prompts.
    targets: Tensor | None
    tokens: dict[str, int]  # number of trained tokens by owner; sums to M, or is 0 for prompts
    # the divisor of each adapter's loss, as its objective gives it; without an entry, `tokens`
    units: dict[str, int] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)  # of each adapter whose objective could not give it
    facts: tuple[tuple[Sequence[float], ...], ...] = ()  # of each owner: those of its samples
    # rows that are run without gradient, by their owners, or None; and for each owner of rows with gradient
    # the sequences among them that its loss reads, by index
    silent: PackedBatch | None = None
    reads: tuple[tuple[int, ...], ...] = ()

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

    def trained_lengths(self) -> list[list[int]]:
        """Returns, for each owner, the trained tokens of each of its sequences."""
        ends = torch.tensor(self.sequences, device="cpu").cumsum(0)
        counts = torch.searchsorted(self.rows, ends.to(self.rows.dtype)).diff(
            prepend=torch.zeros(1, dtype=torch.int64, device="cpu")
        )
        found, begin = [], 0
        rest = list(zip(self.sequences, counts.tolist(), strict=True))
        for rows in self.lengths:
            own: list[int] = []
            while rows:
                length, trained = rest[begin]
                own.append(trained)
                rows, begin = rows - length, begin + 1
            found.append(own)
        return found

    def rows_of_owners(self) -> list[int]:
        """Returns how many of `rows` each owner has."""
        ends = torch.tensor(self.lengths, device="cpu").cumsum(0)
        counts = torch.searchsorted(self.rows, ends.to(self.rows.dtype)).diff(
            prepend=torch.zeros(1, dtype=torch.int64, device="cpu")
        )
        found: list[int] = counts.tolist()
        return found

    def description(self) -> dict[str, Sequence[Any]]:
        """Returns plain arguments for `PackedRows.of`."""
        return {
            "names": self.names,
            "lengths": self.lengths,
            "row0": self.row0,
            "sequences": self.sequences,
        }


def pack(
    batches: Mapping[str | None, Sequence[Sample]],
    *,
    row0: Mapping[str, int] | None = None,
    vocab_size: int | None = None,
    device: torch.device | str = "cpu",
    starts: Mapping[str, str] | None = None,
) -> PackedBatch:
    """Packs samples row after row, in the order of the mapping.

    Args:
        batches: samples by adapter name; None or `__base__` is the base model alone.
        row0: rows that an adapter has already seen in its current optimizer step; default 0.
        vocab_size: ids must lie below it; None = unchecked.
        starts: for adapters that compare with the weights that they began with, the names of these.

    Raises:
        ValueError: a sample is empty, its labels differ in length, or an id is outside the vocabulary.
    """
    names = tuple(name or BASE for name in batches)
    ids: list[int] = []
    labels: list[int] = []
    sequences: list[int] = []
    lengths: list[int] = []
    tokens: dict[str, int] = {}
    for name, samples in zip(names, batches.values(), strict=True):
        begin = len(ids)
        for index, sample in enumerate(samples):
            for sequence in sample.sequences:
                _check(name, index, sequence, vocab_size)
                ids += sequence.input_ids
                labels += sequence.row_targets
                sequences.append(len(sequence.input_ids))
        lengths.append(len(ids) - begin)
        tokens[name] = lengths[-1] - labels[begin:].count(NOT_TRAINED)
    # after the adapters' own sequences were checked, which errors name
    silent, reads = _pack_silent(batches, vocab_size, device, starts or {})
    seen = tuple(0 if row0 is None else row0.get(name, 0) for name in names)
    table = torch.tensor(labels, dtype=torch.int32, device="cpu")
    rows = (table != NOT_TRAINED).nonzero().squeeze(1)
    return PackedBatch(
        names,
        tuple(lengths),
        seen,
        tuple(sequences),
        torch.tensor([ids], dtype=torch.int64, device="cpu").to(device),
        rows.to(torch.int32),
        table[rows],
        tokens,
        facts=tuple(tuple(sample.facts for sample in samples) for samples in batches.values()),
        silent=silent,
        reads=reads,
    )


def _pack_silent(
    batches: Mapping[str | None, Sequence[Any]],
    vocab_size: int | None,
    device: torch.device | str,
    starts: Mapping[str, str],
) -> tuple[PackedBatch | None, tuple[tuple[int, ...], ...]]:
    """Packs the sequences that are run without gradient, and says which of them each owner's samples read.

    Equal sequences of one owner, such as the references of several adapters on the same data, are run once.
    """
    asked = []
    for name, samples in batches.items():
        renamed = {owner_of(START, name): starts[name]} if name is not None and name in starts else {}
        silent = [each for sample in samples for each in sample.silent]
        asked.append([(renamed.get(owner, owner), sequence) for owner, sequence in silent])
    owners: dict[str | None, dict[Sample, None]] = {}
    for name, sequence in (each for own in asked for each in own):
        owners.setdefault(name, {})[sequence] = None
    if not owners:
        return None, ()
    packed = pack({name: list(own) for name, own in owners.items()}, vocab_size=vocab_size, device=device)
    places = {each: index for index, each in enumerate((n, s) for n, own in owners.items() for s in own)}
    return packed, tuple(tuple(places[each] for each in own) for own in asked)


def pack_prompts(
    batches: Mapping[str | None, Sequence[Sequence[int]]], *, device: torch.device | str = "cpu"
) -> PackedBatch:
    """Packs sequences whose next tokens are asked for; `rows` are the sequences' last rows."""
    names = tuple(name or BASE for name in batches)
    sequences = [len(ids) for rows in batches.values() for ids in rows]
    if not all(sequences):
        raise ValueError("sequences: expected at least one token in each, got none")
    ids = [token for rows in batches.values() for row in rows for token in row]
    return PackedBatch(
        names,
        tuple(sum(map(len, rows)) for rows in batches.values()),
        (0,) * len(names),
        tuple(sequences),
        torch.tensor([ids], dtype=torch.int64, device="cpu").to(device),
        torch.tensor(sequences, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32) - 1,
        None,
        dict.fromkeys(names, 0),
    )


def _check(name: str, index: int, sample: Sample, vocab_size: int | None) -> None:
    where = f"adapter {name!r}, sample {index}"
    if not sample.input_ids:
        raise ValueError(f"{where}: expected at least one token, got none")
    if len(sample.labels) != len(sample.input_ids):
        raise ValueError(f"{where}: expected {len(sample.input_ids)} labels, got {len(sample.labels)}")
    if vocab_size is None:
        return
    labels = () if sample.is_labelled else sample.labels
    for what, values, smallest in (("id", sample.input_ids, 0), ("label", labels, NOT_TRAINED)):
        if not values:
            continue
        low, high = min(values), max(values)
        if low < smallest or high >= vocab_size or (what == "label" and NOT_TRAINED < low < 0):
            wrong = high if high >= vocab_size else low
            raise ValueError(f"{where}: {what} {wrong} is outside the vocabulary of {vocab_size}")
