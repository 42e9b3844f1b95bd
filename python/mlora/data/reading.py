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
from mlora.data.formats import Parser, Reading, format_hint, parser_of
from mlora.data.readers import Row
from mlora.data.record import FormatError, NoTokenizerError, Prompt, Record, check_ids
from mlora.data.token_table import record_batches
from mlora.errors import RunError, RustTold

if TYPE_CHECKING:
    import pyarrow as pa

TOTAL = "samples"  # what `read_batches` counts besides the samples with a fault
_CHUNK = 1000  # rows that another process gets at once
_Done = tuple[list[Any], Counter[str]]  # record batches, and what they count


def read_batches(
    reading: Reading, rows: Iterable[Row], counts: Counter[str], processes: int = 1
) -> Iterator[pa.RecordBatch]:
    """Yields the samples that are trained, in their order, with their prompts.

    Args:
        reading: how rows become samples.
        rows: of the source.
        counts: counts all samples, and those with a fault by what it is.
        processes: that share the work. Rows that need no tokenizer are read in this process alone.

    Raises:
        RunError: a row is wrong; it names the first such row.
    """
    if processes > 1 and reading.tokenizer is not None:
        return _in_processes(reading, rows, counts, processes)
    return _batches(reading, rows, parser_of(reading), counts)


def _batches(
    reading: Reading, rows: Iterable[Row], parse: Parser, counts: Counter[str]
) -> Iterator[pa.RecordBatch]:
    return record_batches(_kept(reading, _parsed(reading, rows, parse), counts))


@dataclass
class _FileChunk:
    rows: list[Row]
    fault: RunError | None = None  # of the row that follows; it counts if these are right


_own: tuple[Reading, Parser]  # of a process that shares the work


def _begin(reading: Reading, parent: int) -> None:
    global _own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches it, too; its parent ends it
    end_with_parent(parent)
    _own = reading, parser_of(reading)


def _batches_of_chunk(chunk: _FileChunk) -> _Done:
    reading, parse = _own
    counts: Counter[str] = Counter()
    batches = list(_batches(reading, chunk.rows, parse, counts))
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
