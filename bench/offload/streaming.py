"""Part `stream`: a training step of several adapters over a base that is in memory, streamed or mapped."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine

from offload.base import QUICK_SHAPE, SHAPE, write_base
from offload.contenders import (
    add_adapters,
    check_direct,
    mapped,
    overlapped,
    random_batch,
    read_a_step,
    reads_of_a_step,
    resident,
    serial,
    stream_of,
    train,
)
from offload.options import Options
from offload.report import SECONDS, Data, at_least, table
from offload.turns import Turn, cores, medians, take_turns

ADAPTERS, RANK, TOKENS = 4, 16, 64
SLOTS = (3, 4)
MUST_BUSY, MUST_FREE = 0.8, 0.9
"""Efficiency of overlapping with all cores computing, and with one of them free."""
RESIDENT = "resident"


class Trained:
    """An engine that trains the same batches as all others; it keeps the losses of its last step."""

    def __init__(self, engine: Engine, batch: Mapping[str, list[Sample]]) -> None:
        self.engine, self._batch = engine, batch
        self.losses: dict[str, float] = {}
        add_adapters(engine, len(batch), RANK)

    def step(self) -> None:
        self.losses = train(self.engine, self._batch)


def run(options: Options) -> dict[str, Any]:
    """Measures all contenders in turns, with all cores computing and with one free.

    Raises:
        OSError: the file system refuses direct reads.
        RuntimeError: losses of two contenders differ.
    """
    shape = QUICK_SHAPE if options.quick else SHAPE
    size = write_base(options.folder, shape)
    batch = random_batch({f"a{number}": TOKENS for number in range(ADAPTERS)}, shape.vocabulary)
    make: dict[str, Callable[[], Engine]] = {RESIDENT: lambda: resident(options.folder)}
    for slots in SLOTS:
        make[_serial(slots)] = partial(serial, options.folder, slots)
        make[_overlapped(slots)] = partial(overlapped, options.folder, slots)
    make["mmap"] = partial(mapped, options.folder, ahead=False)
    make["mmap ahead"] = partial(mapped, options.folder, ahead=True)
    trained = {name: Trained(engine(), batch) for name, engine in make.items()}
    streams = {slots: stream_of(trained[_overlapped(slots)].engine) for slots in SLOTS}
    cases: dict[str, Callable[[], object]] = {name: one.step for name, one in trained.items()}
    cases |= {_reading(slots): partial(read_a_step, stream) for slots, stream in streams.items()}
    read = {str(slots): reads_of_a_step(stream)[1] for slots, stream in streams.items()}
    check_direct(streams[SLOTS[0]])
    sections = {}
    for threads in sorted({options.threads, max(1, options.threads - 1)}, reverse=True):
        torch.set_num_threads(threads)
        sections[str(threads)] = _section(cases, trained, options.turns)
    about = {"base_bytes": size, "adapters": ADAPTERS, "rank": RANK, "tokens": TOKENS, "read_bytes": read}
    data = {"shape": shape.options, **about, "cores": cores(), "threads": sections}
    return data | {"must": _must(data)}


def _section(
    cases: Mapping[str, Callable[[], object]], trained: Mapping[str, Trained], turns: int
) -> dict[str, Any]:
    """Returns the turns on one number of threads, and the efficiency of overlapping in each."""
    found = []
    for turn in range(turns):
        found += take_turns(cases, 1, warm_up=0 if turn else 1)
        check_equal({name: one.losses for name, one in trained.items()})
    efficiency = {str(slots): [_efficiency(turn, slots) for turn in found] for slots in SLOTS}
    return {
        "turns": found,
        "medians": medians(found),
        "efficiency": efficiency,
        "losses": trained[RESIDENT].losses,
    }


def check_equal(losses: Mapping[str, Mapping[str, float]]) -> None:
    """Raises RuntimeError if contenders' losses differ in any bit."""
    first, *others = losses
    for name in others:
        if losses[name] != losses[first]:
            raise RuntimeError(f"losses of {name} and {first} differ: {losses[name]} and {losses[first]}")


def _efficiency(turn: Turn, slots: int) -> float:
    """Returns which share of the time that could be hidden was hidden."""
    one_after_the_other, together = turn[_serial(slots)]["seconds"], turn[_overlapped(slots)]["seconds"]
    hidden = min(turn[RESIDENT]["seconds"], turn[_reading(slots)]["seconds"])
    return (one_after_the_other - together) / hidden


def _serial(slots: int) -> str:
    return f"serial, {slots} slots"


def _overlapped(slots: int) -> str:
    return f"overlapped, {slots} slots"


def _reading(slots: int) -> str:
    return f"I/O alone, {slots} slots"


def _must(data: Data) -> list[dict[str, Any]]:
    found = []
    for threads, section in data["threads"].items():
        must = MUST_FREE if int(threads) < data["cores"] else MUST_BUSY
        for slots, each in section["efficiency"].items():
            what = f"efficiency, {slots} slots, {threads} of {data['cores']} cores computing"
            found.append(at_least(what, statistics.median(each), must))
    return found


def text(data: Data) -> list[str]:
    """Returns a table for each number of threads, and the efficiency in each turn."""
    shape = data["shape"]
    read = ", ".join(f"{size / 1e9:.2f} GB with {slots} slots" for slots, size in data["read_bytes"].items())
    lines = [
        f"Llama {shape['hidden_size']}/{shape['intermediate_size']}, {shape['num_hidden_layers']} blocks of "
        f"{data['base_bytes'] / 1e9:.2f} GB bf16; {data['adapters']} adapters of rank {data['rank']} on all "
        f"linear layers, {data['tokens']} tokens each",
        f"a step reads {read}; losses of all contenders were equal to the last bit in every turn",
    ]
    for threads, section in data["threads"].items():
        lines += ["", f"{threads} of {data['cores']} cores computing", *table(section["medians"], SECONDS)]
        for slots, each in section["efficiency"].items():
            turns = " ".join(f"{one:.2f}" for one in each)
            lines.append(
                f"(serial - overlapped) / min(compute, I/O), {slots} slots: "
                f"median {statistics.median(each):.2f}, by turn {turns}"
            )
    return lines
