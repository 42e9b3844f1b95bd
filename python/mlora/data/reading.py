"""Rows become samples, in this process or in several at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from mlora.cluster.worker import end_with_parent
from mlora.data.format_hint import format_hint
from mlora.data.formats import Parser, parser_of
from mlora.data.label_formats import LabelRules
from mlora.data.readers import Row
from mlora.data.record import FormatError, NoTokenizerError, Prompt, Record, check_ids
from mlora.data.token_table import record_batches
from mlora.errors import RunError, RustTold
from mlora.objectives.registry import Style

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

TOTAL = "samples"  # what `Reading.batches` counts besides the samples with a fault
_CHUNK = 1000  # rows that another process gets at once
_Done = tuple[list[Any], Counter[str]]  # record batches, and what they count


@dataclass(frozen=True)
class Reading:
    """How the rows of a source become samples.

    Attributes:
        path: of the source, for messages.
        tokenizer: the base model's; only the format ``tokens`` needs none.
        format: of the rows.
        assistant_only_loss: of messages, train only what the assistant says.
        style: which of TRL's trainers tokenises preference data so.
        labels: how labels are read; ``classification`` and ``question_answering`` need it.
        max_length: longer samples are cut to their first ``max_length`` tokens.
        vocab_size: of the base model; ids outside it are refused.
        max_positions: the longest sequence that the base model takes; None = unlimited.
        ends: ids of the tokens that end an answer; samples have prompts if some are given.
    """

    path: str
    tokenizer: PreTrainedTokenizerBase | None
    format: str
    assistant_only_loss: bool
    style: Style
    labels: LabelRules | None
    max_length: int
    vocab_size: int
    max_positions: int | None
    ends: tuple[int, ...] = ()

    def parser(self) -> Parser:
        """Returns the function that reads the format's rows; raises FormatError for what it lacks."""
        return parser_of(
            self.format,
            self.tokenizer,
            assistant_only_loss=self.assistant_only_loss,
            style=self.style,
            labels=self.labels,
            ends=self.ends,
        )

    def batches(
        self, rows: Iterable[Row], counts: Counter[str], processes: int = 1
    ) -> Iterator[pa.RecordBatch]:
        """Yields the samples that are trained, in their order, with their prompts.

        Args:
            rows: of the source.
            counts: counts all samples, and those with a fault by what it is.
            processes: that share the work. Rows that need no tokenizer are read in this process alone.

        Raises:
            RunError: a row is wrong; it names the first such row.
        """
        if processes > 1 and self.tokenizer is not None:
            return _in_processes(self, rows, counts, processes)
        return record_batches(_kept(self, _parsed(self, rows, self.parser()), counts))


@dataclass
class _FileChunk:
    rows: list[Row]
    fault: RunError | None = None  # of the row that follows; it counts if these are right


_own: tuple[Reading, Parser]  # of a process that shares the work


def _begin(reading: Reading, parent: int) -> None:
    global _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too; its parent ends it
    end_with_parent(parent)
    _own = reading, reading.parser()


def _batches_of_chunk(chunk: _FileChunk) -> _Done:
    reading, parse = _own
    counts: Counter[str] = Counter()
    batches = list(record_batches(_kept(reading, _parsed(reading, chunk.rows, parse), counts)))
    if chunk.fault is not None:
        raise chunk.fault
    return batches, counts


def _chunks(rows: Iterable[Row]) -> Iterator[_FileChunk]:
    rows, chunk = iter(rows), _FileChunk([])
    while chunk.fault is None:
        chunk = _FileChunk([])
        try:
            chunk.rows.extend(islice(rows, _CHUNK))
        except RunError as error:
            chunk.fault = error
        if not chunk.rows and chunk.fault is None:
            return
        yield chunk


def _in_processes(
    reading: Reading, rows: Iterable[Row], counts: Counter[str], processes: int
) -> Iterator[pa.RecordBatch]:
    context = multiprocessing.get_context("spawn")
    waiting: deque[Future[_Done]] = deque()

    def next_done() -> list[pa.RecordBatch]:
        batches, counted = waiting.popleft().result()
        counts.update(counted)
        return batches

    with ProcessPoolExecutor(processes, context, _begin, (reading, os.getpid())) as pool:
        try:
            for chunk in _chunks(rows):
                waiting.append(pool.submit(_batches_of_chunk, chunk))
                if len(waiting) > 2 * processes:
                    yield from next_done()
            while waiting:
                yield from next_done()
        except BrokenProcessPool:
            raise RunError(
                f"{reading.path}: a process that tokenises has ended. If memory ran out, lower "
                f"dataset_num_proc, which is {processes}. A script that trains needs `if __name__ == "
                '"__main__":`'
            ) from None
        finally:
            for each in waiting:
                each.cancel()


def _parsed(reading: Reading, rows: Iterable[Row], parse: Parser) -> Iterator[tuple[str, Record]]:
    """Yields what rows become; tells which one is wrong."""
    first = ""
    for place, fields in rows:
        try:
            with RustTold(f"{place}: the base model's tokenizer fails"):
                record = parse(fields)
            check_ids(record.sample, reading.vocab_size)
        except NoTokenizerError as error:
            if not first:
                raise RunError(f"{place}: {error}") from None
            raise RunError(
                f"{place}: has {error.keys}, but the lines before it, from {first} on, have input_ids; write "
                "all lines of a file alike"
            ) from None
        except FormatError as error:
            raise RunError(f"{place}: {error}{format_hint(reading.format, fields)}") from None
        first = first or place.removeprefix(reading.path).replace(":", "line ").lstrip(", ")
        yield place, record


def _kept(
    reading: Reading, records: Iterable[tuple[str, Record]], counts: Counter[str]
) -> Iterator[tuple[Any, Prompt | None]]:
    """Yields the samples that are trained, with their prompts, and counts all and those with a fault."""
    for place, record in records:
        counts[TOTAL] += 1
        whole = max(part.rows for part in record.sample.parts) <= reading.max_length
        if not whole:
            counts[f"are longer than max_length {reading.max_length} and were cut"] += 1
        sample = record.sample.cut(reading.max_length)
        longest = max(part.rows for part in sample.parts)
        if reading.max_positions is not None and longest > reading.max_positions:
            raise RunError(
                f"{place}: the sample has {longest} tokens, but the base model takes at most "
                f"{reading.max_positions}; set max_length to {reading.max_positions} or less"
            )
        trained = all(part.trained_tokens for part in sample.parts)
        if not trained:
            counts["have no trained token and are left out"] += 1
        if record.doubt:
            counts[record.doubt] += 1
        if trained:
            yield sample, record.prompt if whole else None
