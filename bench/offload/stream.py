"""Part `stream`: a training step of several adapters over a base that is in memory, streamed or mapped."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
from mlora.data.dataset import Sample
from mlora.engine.engine import Engine
from shared.harness import SECONDS, Found, Target, table
from shared.timing import Turn, alternate, cores, medians

from offload.base import QUICK_SHAPE, SHAPE, sizes_of, write_base
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


def run(options: argparse.Namespace) -> Found:
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
    reads = ", ".join(f"{each / 1e9:.2f} GB with {slots} slots" for slots, each in read.items())
    lines = [
        f"{sizes_of(shape)} of {size / 1e9:.2f} GB bf16; {ADAPTERS} adapters of rank {RANK} on all "
        "linear layers, "
        f"{TOKENS} tokens each",
        f"a step reads {reads}; losses of all contenders were equal to the last bit in every turn",
    ]
    sections, must = {}, []
    for threads in sorted({options.threads, max(1, options.threads - 1)}, reverse=True):
        torch.set_num_threads(threads)
        turns = []
        for turn in range(options.turns):
            turns += alternate(cases, 1, warm_up=0 if turn else 1)
            check_equal({name: one.losses for name, one in trained.items()})
        efficiency = {slots: [efficiency_of(turn, slots) for turn in turns] for slots in SLOTS}
        sections[str(threads)] = {"turns": turns, "medians": medians(turns), "efficiency": efficiency}
        lines += ["", f"{threads} of {cores()} cores computing", *table(medians(turns), SECONDS)]
        for slots, each in efficiency.items():
            shown = " ".join(f"{one:.2f}" for one in each)
            lines.append(f"(serial - overlapped) / min(compute, I/O), {slots} slots, by turn: {shown}")
            what = f"efficiency, {slots} slots, {threads} of {cores()} cores computing"
            bound = MUST_FREE if threads < cores() else MUST_BUSY
            must.append(Target(what, statistics.median(each), least=bound))
    about = {"base_bytes": size, "adapters": ADAPTERS, "rank": RANK, "tokens": TOKENS, "read_bytes": read}
    return Found({"shape": shape.options, **about, "cores": cores(), "threads": sections}, lines, must)


def check_equal(losses: Mapping[str, Mapping[str, float]]) -> None:
    """Raises RuntimeError if contenders' losses differ in any bit."""
    first, *others = losses
    for name in others:
        if losses[name] != losses[first]:
            raise RuntimeError(f"losses of {name} and {first} differ: {losses[name]} and {losses[first]}")


def efficiency_of(turn: Turn, slots: int) -> float:
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
