"""Packs samples of several adapters into rows, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mlora.data.micro_batch import BASE, MicroBatch
from mlora.data.record import NOT_TRAINED, Sample
from mlora.objectives.options import START, owner_of


def pack(
    batches: Mapping[str | None, Sequence[Sample]],
    *,
    row0: Mapping[str, int] | None = None,
    vocab_size: int | None = None,
    device: torch.device | str = "cpu",
    starts: Mapping[str, str] | None = None,
) -> MicroBatch:
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
    trained: list[list[int]] = []
    for name, samples in zip(names, batches.values(), strict=True):
        begin = len(ids)
        trained.append([])
        for index, sample in enumerate(samples):
            for sequence in sample.sequences:
                _check(name, index, sequence, vocab_size)
                targets = sequence.row_targets
                ids += sequence.input_ids
                labels += targets
                sequences.append(len(targets))
                trained[-1].append(len(targets) - targets.count(NOT_TRAINED))
        lengths.append(len(ids) - begin)
    # after the adapters' own sequences were checked, which errors name
    silent, reads = _pack_silent(batches, vocab_size, device, starts or {})
    seen = tuple(0 if row0 is None else row0.get(name, 0) for name in names)
    table = torch.tensor(labels, dtype=torch.int32, device="cpu")
    rows = (table != NOT_TRAINED).nonzero().squeeze(1)
    return MicroBatch(
        names,
        tuple(lengths),
        seen,
        tuple(sequences),
        trained,
        rows.to(torch.int32),
        table[rows],
        torch.tensor([ids], dtype=torch.int64, device="cpu").to(device),
        facts=tuple(tuple(sample.facts for sample in samples) for samples in batches.values()),
        silent=silent,
        reads=reads,
    )


def _pack_silent(
    batches: Mapping[str | None, Sequence[Any]],
    vocab_size: int | None,
    device: torch.device | str,
    starts: Mapping[str, str],
) -> tuple[MicroBatch | None, tuple[tuple[int, ...], ...]]:
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
) -> MicroBatch:
    """Packs sequences whose next tokens are asked for; `rows` are the sequences' last rows."""
    names = tuple(name or BASE for name in batches)
    sequences = [len(ids) for rows in batches.values() for ids in rows]
    if not all(sequences):
        raise ValueError("sequences: expected at least one token in each, got none")
    ids = [token for rows in batches.values() for row in rows for token in row]
    return MicroBatch(
        names,
        tuple(sum(map(len, rows)) for rows in batches.values()),
        (0,) * len(names),
        tuple(sequences),
        [[1] * len(rows) for rows in batches.values()],
        torch.tensor(sequences, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32) - 1,
        None,
        torch.tensor([ids], dtype=torch.int64, device="cpu").to(device),
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
