"""Samples of token ids in an Arrow table: written once, then read row by row from a memory-mapped file.

A token takes five bytes: four of its id, one that says whether it is trained. Labels that are not the ids
themselves take four bytes each in place of the one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mlora.data.preference import Judged, Pair
from mlora.data.record import NOT_TRAINED, AnswerSample, LabelledSample, Prompt, Sample

_ROWS, _TOKENS = 10_000, 1 << 20  # of a record batch, about: what is in memory while a table is written
_SCHEMA = pa.schema(
    {
        "ids": pa.list_(pa.int32()),  # of all sequences of the sample
        "trained": pa.list_(pa.uint8()),  # 1 = the label is the id, 0 = not trained; empty if `labels` tells
        "labels": pa.list_(pa.int32()),
        "first": pa.int32(),  # see `_Columns`
        "values": pa.list_(pa.float64()),
        "prompt": pa.list_(pa.int32()),  # of `Prompt`; all of it is null where a sample has none
        "completion": pa.string(),
        "limit": pa.int32(),
    }
)


class _Columns(NamedTuple):
    """A sample as plain numbers."""

    ids: Sequence[int]
    labels: Sequence[int]
    first: int = 0  # of a pair, the tokens of the chosen sequence; of a judged sample, those of its prompt
    values: Sequence[float] = ()


class _Kind(NamedTuple):
    """How samples of one class become columns, and back."""

    columns: Callable[[Any], _Columns]
    sample: Callable[[_Columns], Any]


def _sample(own: _Columns) -> Sample:
    return Sample(tuple(own.ids), tuple(own.labels))


def _labelled(own: _Columns) -> LabelledSample:
    ids, labels, values = tuple(own.ids), tuple(own.labels), tuple(own.values)
    if own.first:
        labels = (NOT_TRAINED,) * (len(ids) - 1) + labels
    return LabelledSample(ids, labels, values, whole=bool(own.first))


def _of_labelled(sample: LabelledSample) -> _Columns:
    labels = sample.labels[-1:] if sample.whole else sample.labels
    return _Columns(sample.input_ids, labels, int(sample.whole), sample.values)


def _answer(own: _Columns) -> AnswerSample:
    positions = tuple(int(value) for value in own.values)
    return AnswerSample(tuple(own.ids), tuple(own.labels) * len(own.ids), positions)


def _pair(own: _Columns) -> Pair:
    ids, labels, first = tuple(own.ids), tuple(own.labels), own.first
    return Pair(Sample(ids[:first], labels[:first]), Sample(ids[first:], labels[first:]))


def _of_pair(pair: Pair) -> _Columns:
    chosen, rejected = pair.parts
    ids, labels = chosen.input_ids + rejected.input_ids, chosen.labels + rejected.labels
    return _Columns(ids, labels, len(chosen.input_ids))


def _judged(own: _Columns) -> Judged:
    desirable, limit = own.values
    ids = tuple(own.ids)
    return Judged(ids[: own.first], ids[own.first :], bool(desirable), None if limit < 0 else int(limit))


def _of_judged(sample: Judged) -> _Columns:
    values = float(sample.desirable), -1.0 if sample.limit is None else float(sample.limit)
    ids = sample.prompt + sample.completion
    return _Columns(ids, ids, len(sample.prompt), values)


_KINDS: dict[type, _Kind] = {
    Sample: _Kind(lambda s: _Columns(s.input_ids, s.labels), _sample),
    LabelledSample: _Kind(_of_labelled, _labelled),
    AnswerSample: _Kind(lambda s: _Columns(s.input_ids, s.labels[:1], 0, s.values), _answer),
    Pair: _Kind(_of_pair, _pair),
    Judged: _Kind(_of_judged, _judged),
}
_BY_NAME = {kind.__name__: kind for kind in _KINDS}


def record_batches(rows: Iterable[tuple[Any, Prompt | None]]) -> Iterator[pa.RecordBatch]:
    """Yields samples, all of one class, with the prompts that they begin with, as parts of a table."""
    for part in _parts(rows):
        kind = type(part[0][0])
        schema = _SCHEMA.with_metadata({"kind": kind.__name__})
        yield pa.record_batch(_arrays(part, _KINDS[kind].columns), schema=schema)


def write_table(batches: Iterable[pa.RecordBatch], sink: Any) -> int:
    """Writes what `record_batches` yields; returns the number of samples.

    Args:
        batches: parts of a table.
        sink: a path or an Arrow output stream; nothing is written to it if there is no sample.
    """
    batches, count = iter(batches), 0
    first = next(batches, None)
    if first is None:
        return 0
    with pa.ipc.new_file(sink, first.schema) as writer:
        for batch in chain([first], batches):
            count += batch.num_rows
            writer.write_batch(batch)
    return count


def _parts(rows: Iterable[tuple[Any, Prompt | None]]) -> Iterator[list[tuple[Any, Prompt | None]]]:
    part, tokens = list[tuple[Any, Prompt | None]](), 0
    for row in rows:
        part.append(row)
        tokens += row[0].rows
        if len(part) >= _ROWS or tokens >= _TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _arrays(part: Sequence[tuple[Any, Prompt | None]], columns: Callable[[Any], _Columns]) -> list[pa.Array]:
    found: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
    for sample, prompt in part:
        own = columns(sample)
        ids, labels = np.array(own.ids, np.int32), np.array(own.labels, np.int32)
        trained = labels != NOT_TRAINED
        plain = len(labels) == len(ids) and bool(((labels == ids) | ~trained).all())
        found["ids"].append(ids)
        found["trained"].append(trained.astype(np.uint8) if plain else ())
        found["labels"].append(() if plain else labels)
        found["first"].append(own.first)
        found["values"].append(own.values)
        found["prompt"].append(prompt and prompt.input_ids)
        found["completion"].append(prompt and prompt.completion)
        found["limit"].append(prompt and prompt.completion_tokens)
    return [pa.array(found[field.name], field.type) for field in _SCHEMA]


class _Lists:
    """The rows of a column of lists, as views of its memory."""

    def __init__(self, column: pa.ListArray) -> None:
        self.values = column.values.to_numpy()
        self.offsets = column.offsets.to_numpy()

    def __getitem__(self, row: int) -> NDArray[Any]:
        found: NDArray[Any] = self.values[self.offsets[row] : self.offsets[row + 1]]
        return found


class _TablePart:
    """A record batch."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        lists = (batch.column(name) for name in ("ids", "trained", "labels", "values"))
        self._ids, self._trained, self._labels, self._values = map(_Lists, lists)
        self._first = batch.column("first").to_numpy()
        self._prompts = [batch.column(name) for name in ("prompt", "completion", "limit")]
        self.lengths: NDArray[np.int64] = np.diff(self._ids.offsets).astype(np.int64)

    def columns(self, row: int) -> _Columns:
        ids, trained, labels = self._ids[row], self._trained[row], self._labels[row]
        if len(trained):
            labels = np.where(trained, ids, NOT_TRAINED)
        return _Columns(ids.tolist(), labels.tolist(), int(self._first[row]), self._values[row].tolist())

    def hollow(self, row: int) -> _Columns:
        return _Columns((0,) * int(self.lengths[row]), (), int(self._first[row]), self._values[row].tolist())

    def rows(self, kind: type) -> NDArray[np.int64]:
        """Returns the rows of each sample."""
        if kind is not Judged:
            return self.lengths
        limits = self._values.values[1::2].astype(np.int64)
        return np.where(limits < 0, self.lengths, np.minimum(self.lengths, limits))

    def longest(self, kind: type) -> NDArray[np.int64]:
        """Returns the rows of each sample's longest sequence."""
        return np.maximum(self._first, self.lengths - self._first) if kind is Pair else self.rows(kind)

    def prompt(self, row: int) -> Prompt | None:
        ids, completion, limit = (column[row].as_py() for column in self._prompts)
        return None if completion is None else Prompt(tuple(ids), completion, limit)


class Samples(Sequence[Any]):
    """Samples of tables, made when they are asked for.

    Args:
        parts: what holds them.
        kind: their class.
        rows: which of the parts' samples these are, and in which order; None: all, in theirs.
    """

    def __init__(
        self, parts: Sequence[_TablePart] = (), kind: type = Sample, rows: NDArray[np.int64] | None = None
    ) -> None:
        self._parts, self._kind, self._rows = list(parts), kind, rows
        self._starts = np.cumsum([0, *(len(part.lengths) for part in self._parts)])

    @classmethod
    def _of_source(cls, source: pa.Buffer | pa.MemoryMappedFile) -> Samples:
        reader = pa.ipc.open_file(source)
        kind = _BY_NAME[reader.schema.metadata[b"kind"].decode()]
        return cls([_TablePart(reader.get_batch(index)) for index in range(reader.num_record_batches)], kind)

    @classmethod
    def of_file(cls, path: Path) -> Samples:
        """Returns the samples of a file that `write_table` wrote, and that must stay as it is."""
        return cls._of_source(pa.memory_map(str(path)))

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, Prompt | None]]) -> Samples:
        """Returns samples with their prompts, kept in memory."""
        return cls.of_batches(record_batches(rows))

    @classmethod
    def of_batches(cls, batches: Iterable[pa.RecordBatch]) -> Samples:
        """Returns the samples of what `record_batches` yields, kept in memory."""
        sink = pa.BufferOutputStream()
        return cls._of_source(sink.getvalue()) if write_table(batches, sink) else cls()

    @classmethod
    def joined(cls, several: Sequence[Samples]) -> Samples:
        """Returns the samples of several, all of one class, one after the other."""
        if len(several) == 1:
            return several[0]
        starts = np.cumsum([0, *(int(each._starts[-1]) for each in several)])
        rows = [each._all_rows() + start for each, start in zip(several, starts, strict=False)]
        return cls([part for each in several for part in each._parts], several[0]._kind, np.concatenate(rows))

    def chosen(self, rows: NDArray[np.int64]) -> Samples:
        """Returns those at these indices, which may repeat, in their order."""
        return Samples(self._parts, self._kind, self._all_rows()[rows])

    def _all_rows(self) -> NDArray[np.int64]:
        return np.arange(int(self._starts[-1])) if self._rows is None else self._rows

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._rows is None else len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        part, row = self._place(index)
        return _KINDS[self._kind].sample(part.columns(row))

    def hollow(self, index: int) -> Any:
        """Returns a sample of the same lengths, whose ids are 0 and whose labels are missing."""
        part, row = self._place(index)
        return _KINDS[self._kind].sample(part.hollow(row))

    def prompts(self) -> list[Prompt]:
        """Returns the prompts of those samples that have one."""
        found = (part.prompt(row) for part, row in map(self._place, range(len(self))))
        return [prompt for prompt in found if prompt is not None]

    def by_rows(self, *, longest_first: bool = False) -> list[int]:
        """Returns the samples' indices in the order of their `rows`, ties in their own order."""
        rows = self._of_all(_TablePart.rows)
        order: list[int] = np.argsort(-rows if longest_first else rows, kind="stable").tolist()
        return order

    def longest(self) -> int:
        """Returns the index of a sample with the longest single sequence."""
        return int(np.argmax(self._of_all(_TablePart.longest)))

    @property
    def tokens(self) -> int:
        """The rows of all samples."""
        return int(self._of_all(_TablePart.rows).sum())

    def _of_all(self, of: Callable[[_TablePart, type], NDArray[np.int64]]) -> NDArray[np.int64]:
        found = np.concatenate([np.zeros(0, np.int64), *(of(part, self._kind) for part in self._parts)])
        return found if self._rows is None else found[self._rows]

    def _place(self, index: int) -> tuple[_TablePart, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = index % len(self) if self._rows is None else int(self._rows[index])
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part], row - int(self._starts[part])
