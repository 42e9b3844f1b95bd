"""Part `adapters`: tokens/s against the number of adapters that share a batch over a streamed base."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from shared.figures import about, figure

from offload.base import QUICK_SHAPE, SHAPE, write_base
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
from offload.options import Options
from offload.report import Data, at_least, table
from offload.streaming import check_equal
from offload.turns import Turn, in_order, timed

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


def run(options: Options) -> dict[str, Any]:
    """Measures all numbers of adapters in turns.

    Raises:
        OSError: the file system refuses direct reads.
        RuntimeError: losses over the streamed base and over the one in memory differ.
    """
    shape = QUICK_SHAPE if options.quick else SHAPE
    size = write_base(options.folder, shape)
    contenders = Contenders(options.folder, shape.vocabulary)
    turns = [contenders.turn(number) for number in range(1 + options.turns)][1:]
    data = {
        "shape": shape.options,
        "base_bytes": size,
        "read_bytes": contenders.step_bytes,
        "counts": COUNTS,
        "alone": ALONE,
        "tokens": TOKENS,
        "rank": RANK,
        "slots": SLOTS,
        "threads": options.threads,
        "turns": turns,
    }
    return data | {"must": _must(turns)}


def tokens_per_second(turns: list[Turn], name: str, count: int) -> float:
    """Returns the median over turns; `count` adapters of 64 tokens."""
    return statistics.median(count * TOKENS / turn[f"{name} {count}"]["seconds"] for turn in turns)


def packed_over_apart(turns: list[Turn], count: int) -> float:
    """Returns how many times the tokens/s of one adapter after the other a packed batch has."""
    return statistics.median(
        turn[f"{APART} {count}"]["seconds"] / turn[f"{STREAMED} {count}"]["seconds"] for turn in turns
    )


def streamed_over_resident(turns: list[Turn], label: str) -> float:
    """Returns the streamed run's tokens/s over those of the one in memory."""
    return statistics.median(
        turn[f"{RESIDENT} {label}"]["seconds"] / turn[f"{STREAMED} {label}"]["seconds"] for turn in turns
    )


def hiding_rows(turns: list[Turn]) -> float:
    """Returns the median of T* over turns."""
    return statistics.median(turn["T*"]["rows"] for turn in turns)


def _must(turns: list[Turn]) -> list[dict[str, Any]]:
    packed = packed_over_apart(turns, JUDGED)
    beyond = streamed_over_resident(turns, f"{BEYOND} T*")
    return [
        at_least(
            f"{JUDGED} adapters of {TOKENS} tokens packed / {APART} (goal {GOAL_PACKED})", packed, MUST_PACKED
        ),
        at_least(f"streamed / resident tokens/s at {BEYOND} T*", beyond, MUST_BEYOND),
    ]


def text(data: Data) -> list[str]:
    """Returns a table of tokens/s by the number of adapters, and T*."""
    turns, shape = data["turns"], data["shape"]
    rows = {}
    for count in data["counts"]:
        row: dict[str, float] = {name: tokens_per_second(turns, name, count) for name in (STREAMED, RESIDENT)}
        row["of_resident"] = streamed_over_resident(turns, f"{count}")
        if count in data["alone"]:
            row[APART] = tokens_per_second(turns, APART, count)
            row["of_apart"] = packed_over_apart(turns, count)
        rows[f"{count} adapters"] = row
    columns = (
        (STREAMED, STREAMED, "8.1f", 1.0),
        (RESIDENT, RESIDENT, "8.1f", 1.0),
        (APART, APART, "8.1f", 1.0),
        ("streamed/resident", "of_resident", "8.2f", 1.0),
        ("packed/one after the other", "of_apart", "8.2f", 1.0),
    )
    each = ", ".join(f"{turn['T*']['rows']:.0f}" for turn in turns)
    return [
        f"Llama {shape['hidden_size']}/{shape['intermediate_size']}, {shape['num_hidden_layers']} blocks of "
        f"{data['base_bytes'] / 1e9:.2f} GB bf16, {data['slots']} slots; adapters of rank {data['rank']} on "
        f"all linear layers, {data['tokens']} tokens each, {data['threads']} threads; tokens/s:",
        *table(rows, columns),
        f"T*: median {hiding_rows(turns):.0f} tokens, by turn {each}",
        f"streamed / resident tokens/s at {BEYOND} T* of the same turn: "
        f"{streamed_over_resident(turns, f'{BEYOND} T*'):.2f}",
        "losses over the streamed base and over the one in memory were equal to the last bit in every turn",
    ]


def plot(data: Data, path: Path) -> None:
    """Draws tokens/s against the number of adapters, with T* marked."""
    turns = data["turns"]
    lines = {RESIDENT: data["counts"], STREAMED: data["counts"], APART: (1, *data["alone"])}
    with figure(path, dpi=120, figsize=(8, 5), layout="constrained") as (_, axes):
        for name, counts in lines.items():
            source = {count: STREAMED if name == APART and count == 1 else name for count in counts}
            values = [tokens_per_second(turns, source[count], count) for count in counts]
            axes.plot([count * data["tokens"] for count in counts], values, "o-", label=_LABELS[name])
        for name, factor, style in (("T*", 1.0, "--"), (f"{BEYOND} T*", BEYOND, ":")):
            rows = factor * hiding_rows(turns)
            axes.axvline(rows, color="grey", linestyle=style, label=f"{name} = {rows:.0f} tokens")
        ticks = [count * data["tokens"] for count in data["counts"]]
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            ticks, [f"{count}\n{rows}" for count, rows in zip(data["counts"], ticks, strict=True)]
        )
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"adapters of {data['tokens']} tokens in a batch, and tokens of the batch")
        axes.set_ylabel("trained tokens/s")
        axes.grid(alpha=0.3)
        axes.legend()
        axes.set_title(about(data["machine"], quick=data["quick"]), fontsize=9)


_LABELS = {
    RESIDENT: "packed, base in memory",
    STREAMED: "packed, base on disk",
    APART: "one adapter after the other, base on disk",
}
