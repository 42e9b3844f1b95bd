"""Reads a dataset's files into samples of token ids and labels."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlora.data.formats import Reading, parser_of
from mlora.data.readers import Row, read_rows, suffix_of
from mlora.data.reading import TOTAL, read_batches
from mlora.data.record import FormatError, Prompt, text_of_key
from mlora.data.record import Sample as Sample  # others import it from here
from mlora.data.sampler import task_seed
from mlora.data.source import Source
from mlora.data.token_cache import keeps, kept_table, table_key
from mlora.data.token_table import Samples
from mlora.errors import RunError
from mlora.regular_files import read_regular


@dataclass(frozen=True)
class Dataset:
    """A dataset as one task sees it.

    Attributes:
        samples: those with at least one trained token in each sequence, cut to the task's ``max_length``:
            `Sample`, or one of `mlora.data.preference`.
        warnings: one line for each reason to cut, leave out or doubt samples.
        fingerprint: what tells its rows from others; see `Source.fingerprint`.
        path: of its file or folder, or the hub's id, for messages; of several the first, and how many more.
    """

    samples: Samples = field(default_factory=Samples)
    warnings: list[str] = field(default_factory=list)
    fingerprint: str = ""
    path: str = ""

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts, in file order, of samples that were not cut and whose answer ends with an end token.

        None, if they were not asked for.
        """
        return self.samples.prompts()


def load_dataset(
    name: str,
    source: Source | str | Path,
    format: str,
    *,
    cache: Path | None = None,
    processes: int = 1,
    **how: Any,
) -> Dataset:
    """Reads what `mlora.data.readers.read_rows` takes. A RunError names the row, if it can.

    Args:
        name: the dataset's name, for messages.
        source: where its rows come from; or a path.
        format: of the rows.
        cache: folder that keeps what large files become; None = nothing is kept.
        processes: that tokenise what the cache keeps.
        how: other attributes of `mlora.data.formats.Reading`.
    """
    source = source if isinstance(source, Source) else Source(os.path.abspath(source))
    path = source.path
    reading = Reading(path=path, format=format, **how)
    try:
        parser_of(reading)
    except FormatError as error:
        raise RunError(f"{path}: the dataset {name!r} of format {format}: {error}") from None
    counts: Counter[str] = Counter()
    rows = _unchanged(source, name) if os.path.isfile(path) else source.rows()
    digest = source.fingerprint()
    if cache is None or not keeps(source):
        samples = Samples.of_batches(read_batches(reading, rows, counts))
    else:
        kind = tuple(suffix.lower() for suffix in Path(path).suffixes)  # tells CSV, TSV and others
        where = digest, kind, source.split, source.subset, source.columns
        of = ("assistant_only_loss", "style", "labels", "max_length", "vocab_size", "max_positions", "ends")
        facts = format, *(getattr(reading, each) for each in of)
        key = table_key(reading.tokenizer, *where, *facts)
        samples = kept_table(cache, key, read_batches(reading, rows, counts, processes), counts)
    total = counts.pop(TOTAL, 0)
    if not total:
        raise RunError(f"{path}: the dataset {name!r} is empty")
    lines = [f"{count} of {total} samples {what}" for what, count in counts.items()]
    if not samples:
        raise RunError(f"{path}: no sample of the dataset {name!r} has a trained token: {'; '.join(lines)}")
    return Dataset(samples, [f"dataset {name!r}: {line}" for line in lines], digest, path)


def joined(parts: Sequence[Dataset], weights: Sequence[float], seed: int) -> Dataset:
    """Returns one dataset of several sources.

    Args:
        parts: of one format.
        weights: how often each sample of a part is there: 2 = twice; 1.5 = once, and half of them, drawn
            at random, twice.
        seed: of these draws.

    Raises:
        RunError: the weights leave no sample.
    """
    if len(parts) == 1 and weights[0] == 1:
        return parts[0]
    found = []
    for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        count, times = len(part.samples), math.floor(weight)
        more = order_of(count, seed, f"file {number}")[: round((weight - times) * count)]
        rows = [*[np.arange(count)] * times, np.sort(more)]
        found.append(part.samples.chosen(np.concatenate(rows)))
    path = parts[0].path + (f" and {len(parts) - 1} more" if len(parts) > 1 else "")
    if not any(map(len, found)):
        raise RunError(f"{path}: weight leaves none of {sum(len(part.samples) for part in parts)} samples")
    told = repr([(part.fingerprint, weight) for part, weight in zip(parts, weights, strict=True)])
    warnings = [line for part in parts for line in part.warnings]
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Dataset(Samples.joined(found), warnings, digest, path)


def held_out(parts: Sequence[Dataset], share: float, seed: int) -> list[tuple[Dataset, Dataset]]:
    """Returns what is left for training of each part, and what is held out, drawn at random from all.

    Both are in their order. Of all parts together, at least one sample stays on each side.

    Args:
        share: of the samples, rounded up; from 1 on their number.
        seed: of the draw.

    Raises:
        RunError: there are not enough samples.
    """
    sizes = [len(part.samples) for part in parts]
    count = sum(sizes)
    held = math.ceil(count * share) if share < 1 else int(share)
    if held >= count:
        none = "and none is left to train on"
        raise RunError(f"{parts[0].path}: validation_split holds out {held} of {count} samples, {none}")
    drawn = np.zeros(count, bool)
    drawn[order_of(count, seed, "validation")[:held]] = True
    sides = np.split(drawn, np.cumsum(sizes)[:-1])
    return [
        (_of_rows(part, np.flatnonzero(~side)), _of_rows(part, np.flatnonzero(side)))
        for part, side in zip(parts, sides, strict=True)
    ]


def _of_rows(data: Dataset, rows: NDArray[np.int64]) -> Dataset:
    return Dataset(data.samples.chosen(rows), data.warnings, data.fingerprint, data.path)


def order_of(count: int, seed: int, what: str) -> NDArray[np.int64]:
    """Returns a random order of `count` things that depends on a seed and on what it is for."""
    return np.random.default_rng(task_seed(seed, what)).permutation(count)


def _unchanged(source: Source, name: str) -> Iterator[Row]:
    """Returns the rows of a file, which raise a RunError at their end if it has changed from now on."""
    before = source.version

    def rows() -> Iterator[Row]:
        yield from source.rows()
        if source.version != before:
            raise RunError(f"{source.path}: the dataset {name!r} changed while it was read; try again")

    return rows()


def read_prompt_lines(path: Path) -> list[str]:
    """Reads ``prompt`` of each row of a ``.jsonl`` or table file, or each line of a text that is not blank.

    Objects without ``prompt`` may have ``text``, as those of classifiers.
    """
    if suffix_of(path) not in (".jsonl", ".json", ".csv", ".tsv", ".parquet"):
        try:
            text = read_regular(path, encoding="utf-8-sig")
            return [line for line in text.split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    prompts = []
    for place, fields in read_rows(path):
        try:
            key = "text" if "text" in fields and "prompt" not in fields else "prompt"
            prompts.append(text_of_key(fields, key))
        except FormatError as error:
            raise RunError(f"{place}: {error}") from None
    return prompts
