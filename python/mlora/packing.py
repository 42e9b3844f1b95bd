"""Samples of several adapters as packed rows, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mlora.attention import PackedSequences
from mlora_ext import SegmentLayout

if TYPE_CHECKING:
    from mlora.data import Sample

BASE = "__base__"
NOT_TRAINED = -100


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch: T rows of several adapters, each adapter's rows together.

    Attributes:
        names: owners of the rows, in order; `__base__` owns rows without an adapter.
        adapters: `names` without `__base__`, as `layout` counts them.
        layout: rows of each owner.
        sequences: rows of each sample.
        input_ids: `[1, T]` int64.
        position_ids: `[1, T]` int64, from 0 in each sample.
        labels: `[T]` int64, the token to predict from each row, or -100.
        rows: `[M]` int64, the rows with a label, in order.
        targets: `[M]` int64, their labels.
        tokens: number of trained tokens by owner; sums to M.
    """

    names: tuple[str, ...]
    adapters: tuple[str, ...]
    layout: SegmentLayout
    sequences: PackedSequences
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    rows: Tensor
    targets: Tensor
    tokens: dict[str, int]


def pack(
    batches: Mapping[str | None, Sequence[Sample]],
    *,
    row0: Mapping[str, int] | None = None,
    vocab_size: int | None = None,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Pack samples row after row, in the order of the mapping.

    Args:
        batches: samples by adapter name; None or `__base__` is the base model alone.
        row0: rows that an adapter has already seen in its current optimizer step; default 0.
        vocab_size: ids must lie below it; None = unchecked.
        device: of the batch's tensors.

    Returns:
        The micro-batch.

    Raises:
        ValueError: naming the adapter and the sample that is empty, whose labels are of another length, or
            which has an id outside the vocabulary.
    """
    names = tuple(name or BASE for name in batches)
    adapters = tuple(name for name in names if name != BASE)
    ids: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    tokens: dict[str, int] = {}
    for name, samples in zip(names, batches.values(), strict=True):
        begin = len(ids)
        for index, sample in enumerate(samples):
            _check(name, index, sample, vocab_size)
            ids += sample.input_ids
            positions += range(len(sample.input_ids))
            labels += sample.labels[1:]
            labels.append(NOT_TRAINED)
            lengths.append(len(sample.input_ids))
        counts.append(len(ids) - begin)
        tokens[name] = counts[-1] - labels[begin:].count(NOT_TRAINED)
    order = {name: index for index, name in enumerate(adapters)}
    seen = [0 if row0 is None else row0.get(name, 0) for name in names]
    layout = SegmentLayout.from_lengths(counts, [order.get(name, -1) for name in names], seen)
    table = torch.tensor([ids, positions, labels], dtype=torch.int64)
    rows = (table[2] != NOT_TRAINED).nonzero().squeeze(1)
    targets = table[2][rows]
    table = table.to(device)
    return PackedBatch(
        names,
        adapters,
        layout,
        PackedSequences.of(tuple(lengths), device),
        table[:1],
        table[1:2],
        table[2],
        rows.to(device),
        targets.to(device),
        tokens,
    )


def _check(name: str, index: int, sample: Sample, vocab_size: int | None) -> None:
    where = f"adapter {name!r}, sample {index}"
    if not sample.input_ids:
        raise ValueError(f"{where}: expected at least one token, got none")
    if len(sample.labels) != len(sample.input_ids):
        raise ValueError(f"{where}: expected {len(sample.input_ids)} labels, got {len(sample.labels)}")
    if vocab_size is None:
        return
    for what, values, smallest in (("id", sample.input_ids, 0), ("label", sample.labels, NOT_TRAINED)):
        low, high = min(values), max(values)
        if low < smallest or high >= vocab_size or (what == "label" and NOT_TRAINED < low < 0):
            wrong = high if high >= vocab_size else low
            raise ValueError(f"{where}: {what} {wrong} is outside the vocabulary of {vocab_size}")
