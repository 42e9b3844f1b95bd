"""Part `adapters`: tokens/s against the number of adapters that share a batch over a streamed base."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from shared.harness import Found, Panel, Target, table
from shared.timing import Turn, in_order, ratio, timed

from offload.base import QUICK_SHAPE, SHAPE, sizes_of, write_base
from offload.contenders import (
    add_adapters,
    check_direct,
    overlapped,
    random_batch,
    read_a_step,
    reads_of_a_step,
    resident,
    stream_of,
    train,
)
from offload.stream import check_equal

COUNTS, TOKENS, RANK, SLOTS = (1, 2, 4, 8, 16), 64, 16, 3
ALONE = (2, 4)
"""Adapters that are also trained one after the other; it takes as long for each of more of them."""
LEAST = 16
"""Tokens of the comparison at 1.5 T*: with tiny models T* is less than a sequence that has a loss."""
BEYOND = 1.5
"""So many times T* are compared with a base in memory."""
MUST_BEYOND = 0.9
MUST_PACKED, GOAL_PACKED, JUDGED = 3.0, 4.0, 4
STREAMED, RESIDENT, APART, READING = "streamed", "resident", "one after the other", "I/O alone"


class Contenders:
    """Three engines with the same adapters: streamed, in memory, and streamed for one adapter at a time."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.engines = {STREAMED: overlapped(folder, SLOTS), RESIDENT: resident(folder)}
        self.apart = overlapped(folder, SLOTS)
        for engine in self.engines.values():
            add_adapters(engine, max(COUNTS), RANK)
        add_adapters(self.apart, max(ALONE), RANK)
        self.stream = stream_of(self.engines[STREAMED])
        self.loads, self.step_bytes = reads_of_a_step(self.stream)
        check_direct(self.stream)
        self.losses: dict[str, dict[str, float]] = {}

    def turn(self, number: int) -> Turn:
        """Runs every case once, then what T* of this turn asks for."""
        cases: dict[str, Callable[[], object]] = {READING: partial(read_a_step, self.stream)}
        for count in COUNTS:
            cases |= self._pair(self._batch([TOKENS] * count), f"{count}")
        for count in ALONE:
            cases[f"{APART} {count}"] = partial(self._one_by_one, self._batch([TOKENS] * count))
        turn = self._timed(cases, number)
        hiding = hiding_tokens(turn, self.loads / len(self.stream.layouts))
        rows = max(LEAST, round(BEYOND * hiding))
        turn |= self._timed(self._pair(self._batch(split(rows)), f"{BEYOND} T*"), number)
        return turn | {"T*": {"rows": hiding}}

    def _batch(self, lengths: list[int]) -> dict[str, list[Sample]]:
        return random_batch({f"a{n}": length for n, length in enumerate(lengths)}, self.vocabulary)

    def _pair(self, batch: Mapping[str, list[Sample]], label: str) -> dict[str, Callable[[], object]]:
        """Returns the step of a batch by both engines that pack adapters."""
        return {
            f"{name} {label}": partial(self._together, name, engine, batch)
            for name, engine in self.engines.items()
        }

    def _together(self, name: str, engine: Engine, batch: Mapping[str, list[Sample]]) -> None:
        self.losses[name] = train(engine, batch)

    def _one_by_one(self, batch: Mapping[str, list[Sample]]) -> None:
        for name, samples in batch.items():
            train(self.apart, {name: samples})

    def _timed(self, cases: Mapping[str, Callable[[], object]], number: int) -> Turn:
        taken = {name: timed(cases[name]) for name in in_order(cases, number)}
        check_equal(self.losses)
        return {name: taken[name] for name in cases}


def hiding_tokens(turn: Turn, passes: float) -> float:
    """Returns T*, the tokens that hide the streaming, by the compute and the bandwidth of a turn.

    A step of T* tokens takes as long, with the base in memory, as two reads of the whole base. That is
    `bytes per parameter * FLOPS / (2 * bandwidth)` with the FLOPS and the bandwidth that the turn measured.

    Args:
        passes: how many times `I/O alone` has read the base: fewer than two, because some blocks stay.
    """
    most = max(COUNTS)
    token = turn[f"{RESIDENT} {most}"]["seconds"] / (most * TOKENS)
    return 2 / passes * turn[READING]["seconds"] / token


def split(rows: int) -> list[int]:
    """Returns how many tokens each adapter of a batch has: about 64, or more where adapters run out."""
    count = min(max(COUNTS), -(-rows // TOKENS))
    return [rows // count + (place < rows % count) for place in range(count)]


def run(options: argparse.Namespace) -> Found:
    """Measures all numbers of adapters in turns.

    Raises:
        OSError: the file system refuses direct reads.
        RuntimeError: losses over the streamed base and over the one in memory differ.
    """
    shape = QUICK_SHAPE if options.quick else SHAPE
    size = write_base(options.folder, shape)
    contenders = Contenders(options.folder, shape.vocabulary)
    turns = [contenders.turn(number) for number in range(1 + options.turns)][1:]
    rows = {f"{count} adapters": row_of(turns, count) for count in COUNTS}
    hiding = [turn["T*"]["rows"] for turn in turns]
    beyond = ratio(turns, f"{RESIDENT} {BEYOND} T*", f"{STREAMED} {BEYOND} T*")
    titles = {
        STREAMED: "8.1f",
        RESIDENT: "8.1f",
        APART: "8.1f",
        "streamed/resident": "8.2f",
        "packed/one after the other": "8.2f",
    }
    lines = [
        f"{sizes_of(shape)} of {size / 1e9:.2f} GB bf16, {SLOTS} slots; adapters of rank {RANK} on "
        "all linear "
        f"layers, {TOKENS} tokens each, {options.threads} threads; tokens/s:",
        *table(rows, tuple((title, title, spec, 1.0) for title, spec in titles.items())),
        f"T*, tokens that hide the streaming, by turn: {' '.join(f'{each:.0f}' for each in hiding)}",
        "losses over the streamed base and over the one in memory were equal to the last bit in every turn",
    ]
    packed = rows[f"{JUDGED} adapters"]["packed/one after the other"]
    must = [
        Target(f"{JUDGED} adapters packed / {APART} (goal {GOAL_PACKED})", packed, least=MUST_PACKED),
        Target(f"streamed / resident tokens/s at {BEYOND} T*", beyond, least=MUST_BEYOND),
    ]
    data = {"shape": shape.options, "base_bytes": size, "read_bytes": contenders.step_bytes, "counts": COUNTS}
    data |= {"alone": ALONE, "tokens": TOKENS, "rank": RANK, "slots": SLOTS, "threads": options.threads}
    series = {
        name: {count: row[name] for count, row in zip(COUNTS, rows.values(), strict=True) if name in row}
        for name in (RESIDENT, STREAMED, APART)
    }
    hidden = statistics.median(hiding)
    title = f"T*, which hides the streaming: {hidden:.0f} tokens, {hidden / TOKENS:.1f} adapters"
    panel = Panel("trained tokens/s", series, title, f"adapters of {TOKENS} tokens in a batch", bars=False)
    return Found(data | {"turns": turns}, lines, must, [panel])


def row_of(turns: list[Turn], count: int) -> dict[str, float]:
    """Returns tokens/s of so many adapters, and how they compare; medians over turns."""

    def rate(name: str) -> float:
        return statistics.median(count * TOKENS / turn[f"{name} {count}"]["seconds"] for turn in turns)

    row = {name: rate(name) for name in (STREAMED, RESIDENT)}
    row["streamed/resident"] = ratio(turns, f"{RESIDENT} {count}", f"{STREAMED} {count}")
    if count in ALONE:
        row[APART] = rate(APART)
        row["packed/one after the other"] = ratio(turns, f"{APART} {count}", f"{STREAMED} {count}")
    return row
