"""Part `optimizer`: states on disk, updated after or under the backward pass (LoHan, IV-C, Fig. 7)."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from shared.harness import SECONDS, Found, Panel, Target, table
from shared.timing import Turn, in_order, medians, ratio, timed
from torch import Tensor

from offload.base import (
    FULL_SHAPE,
    QUICK_FULL,
    SEQUENCE,
    Tuned,
    parameters_in_blocks,
    random_tokens,
    sizes_of,
)
from offload.stream import check_equal

NONE, MEMORY, SERIAL, NAIVE, OPTIMISED = "no optimizer", "states in memory", "serial", "naive", "optimised"
ALONE = "optimizer alone"
CONTENDERS: Mapping[str, Mapping[str, Any]] = {
    NONE: {"optimizer": False},
    MEMORY: {"states": "host", "active": True},
    SERIAL: {"active": False, "buffers": 3},
    NAIVE: {"active": True, "buffers": 1},
    OPTIMISED: {"active": True, "buffers": 3},
    ALONE: {"active": False, "buffers": 3},
}
MUST = 0.8
"""Median efficiency of overlapping."""
PROBE, MOST = 4, 32
"""Sequences of a batch that is timed first, and of the largest batch."""
EQUAL_ENOUGH = 1.25
"""Backward and optimizer take equally long if the longer one takes at most so many times the other."""


def run(options: argparse.Namespace) -> Found:
    """Measures all contenders in turns, with as many tokens as make backward as long as the optimizer.

    Raises:
        OSError: the file system refuses direct reads, or lacks room for the states.
        RuntimeError: losses of two contenders differ.
    """
    shape = QUICK_FULL if options.quick else FULL_SHAPE
    tuned = {name: Tuned(shape, folders=[options.folder], **how) for name, how in CONTENDERS.items()}
    try:
        tokens = 64 if options.quick else _tokens(tuned, shape.vocabulary)
        ids = random_tokens(tokens, shape.vocabulary)
        for one in tuned.values():
            one.losses.clear()
        turns = [_turn(tuned, ids, number) for number in range(1 + options.turns)][1:]
    finally:
        for one in tuned.values():
            one.close()
    rows, parameters = medians(turns), parameters_in_blocks(shape)
    backward, alone = rows[NONE]["backward"], rows[ALONE]["seconds"]
    apart = max(backward, alone) / min(backward, alone)
    warning = "" if apart <= EQUAL_ENOUGH else f"; NOT EQUAL, at most {EQUAL_ENOUGH} times is meant"
    efficiencies, compared = [efficiency(turn) for turn in turns], [over_naive(turn) for turn in turns]
    naive, bound = (statistics.median(one[key] for one in compared) for key in ("ratio", "bound"))
    lines = [
        f"full tuning, {sizes_of(shape)} of {parameters / 1e6:.0f} million parameters, bf16; "
        "weights in memory, "
        f"states of {12 * parameters / 1e9:.2f} GB on disk; {tokens} tokens in sequences of "
        f"{min(SEQUENCE, tokens)}, {torch.get_num_threads()} threads",
        *table(rows, SECONDS),
        f"backward alone {backward * 1e3:.0f} ms, optimizer alone {alone * 1e3:.0f} ms{warning}",
        "efficiency, (serial - optimised) / min(backward, optimizer alone), by turn: "
        + " ".join(f"{one:.2f}" for one in efficiencies),
        f"optimised is {naive:.2f} times as fast as naive; these figures allow at most {bound:.2f}",
        f"optimised is {ratio(turns, SERIAL, OPTIMISED):.2f} times as fast as serial",
        "losses of all contenders were equal to the last bit in every turn; that without an optimizer to the "
        "others' first",
    ]
    data = {"shape": shape.options, "parameters": parameters, "tokens": tokens, "turns": turns}
    data |= {"threads": torch.get_num_threads(), "efficiency": efficiencies, "over_naive": compared}
    must = [Target("median efficiency of active updates", statistics.median(efficiencies), least=MUST)]
    panel = Panel("seconds of a step", {"median": {name: row["seconds"] for name, row in rows.items()}})
    return Found(data, lines, must, [panel])


def _tokens(tuned: Mapping[str, Tuned], vocabulary: int) -> int:
    """Returns tokens with which the backward pass takes about as long as the optimizer alone."""
    ids = random_tokens(PROBE * SEQUENCE, vocabulary)
    backward, optimizer = [], []
    for _ in range(3):
        tuned[NONE].step(ids)
        backward.append(tuned[NONE].backward)
        optimizer.append(timed(tuned[ALONE].update)["seconds"])
    sequences = PROBE * min(optimizer[1:]) / min(backward[1:])
    return SEQUENCE * min(MOST, max(1, round(sequences)))


def _turn(tuned: Mapping[str, Tuned], ids: Tensor, number: int) -> Turn:
    """Runs every contender once; raises RuntimeError if losses differ."""
    cases: dict[str, Callable[[], object]] = {name: partial(one.step, ids) for name, one in tuned.items()}
    cases[ALONE] = tuned[ALONE].update
    taken = {}
    for name in in_order(cases, number):
        taken[name] = timed(cases[name])
        taken[name] |= {"forward": tuned[name].forward, "backward": tuned[name].backward}
    updated = [name for name in tuned if name not in (NONE, ALONE)]
    check_equal({name: {"loss": tuned[name].losses[-1]} for name in updated})
    check_equal({"first": {"loss": tuned[SERIAL].losses[0]}, NONE: {"loss": tuned[NONE].losses[-1]}})
    return {name: taken[name] for name in cases}


def efficiency(turn: Mapping[str, Mapping[str, float]]) -> float:
    """Returns how much of the time that can be hidden is hidden: 1 = all of it."""
    saved = turn[SERIAL]["seconds"] - turn[OPTIMISED]["seconds"]
    return saved / min(turn[NONE]["backward"], turn[ALONE]["seconds"])


def over_naive(turn: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns how many times as fast as the naive form the optimised one is, and the most it could be.

    It can be no faster than the forward pass and the longer of the backward pass and the optimizer alone.
    """
    naive, none = turn[NAIVE]["seconds"], turn[NONE]
    bound = none["forward"] + max(none["backward"], turn[ALONE]["seconds"])
    return {"ratio": naive / turn[OPTIMISED]["seconds"], "bound": naive / bound}
