"""Part `optimizer`: states on disk, updated after or under the backward pass (LoHan, IV-C, Fig. 7)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from shared.figures import about, figure
from torch import Tensor

from offload.full_model import (
    QUICK_SHAPE,
    SEQUENCE,
    SHAPE,
    Tuned,
    parameters_in_blocks,
    random_tokens,
)
from offload.options import Options
from offload.report import SECONDS, Data, at_least, table
from offload.streaming import check_equal
from offload.turns import Turn, in_order, medians, timed

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


def run(options: Options) -> dict[str, Any]:
    """Measures all contenders in turns, with as many tokens as make backward as long as the optimizer.

    Raises:
        OSError: the file system refuses direct reads, or lacks room for the states.
        RuntimeError: losses of two contenders differ.
    """
    shape = QUICK_SHAPE if options.quick else SHAPE
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
    data = {
        "shape": shape.options,
        "parameters": parameters_in_blocks(shape),
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "turns": turns,
        "efficiency": [efficiency(turn) for turn in turns],
        "over_naive": [over_naive(turn) for turn in turns],
    }
    return data | {
        "must": [at_least("median efficiency of active updates", _median(data["efficiency"]), MUST)]
    }


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


def _median(values: list[float]) -> float:
    return statistics.median(values)


def text(data: Data) -> list[str]:
    """Returns a table of contenders, and the figures of each turn."""
    turns, shape = data["turns"], data["shape"]
    backward = _median([turn[NONE]["backward"] for turn in turns])
    alone = _median([turn[ALONE]["seconds"] for turn in turns])
    apart = max(backward, alone) / min(backward, alone)
    warning = "" if apart <= EQUAL_ENOUGH else f"; NOT EQUAL, at most {EQUAL_ENOUGH} times is meant"
    ratios = [one["ratio"] for one in data["over_naive"]]
    bounds = [one["bound"] for one in data["over_naive"]]
    return [
        f"full tuning, Llama {shape['hidden_size']}/{shape['intermediate_size']}, "
        f"{shape['num_hidden_layers']} blocks of {data['parameters'] / 1e6:.0f} million parameters, bf16; "
        f"weights in memory, states of {12 * data['parameters'] / 1e9:.2f} GB on disk; {data['tokens']} "
        f"tokens in sequences of {min(SEQUENCE, data['tokens'])}, {data['threads']} threads",
        *table(medians(turns), SECONDS),
        f"backward alone {backward * 1e3:.0f} ms, optimizer alone {alone * 1e3:.0f} ms{warning}",
        "efficiency, (serial - optimised) / min(backward, optimizer alone): median "
        f"{_median(data['efficiency']):.2f}, by turn {_listed(data['efficiency'])}",
        f"optimised is {_median(ratios):.2f} times as fast as naive (by turn {_listed(ratios)}); these "
        f"figures allow at most {_median(bounds):.2f} (by turn {_listed(bounds)})",
        f"optimised is {_median([_over_serial(turn) for turn in turns]):.2f} times as fast as serial",
        "losses of all contenders were equal to the last bit in every turn; that without an optimizer to the "
        "others' first",
    ]


def _over_serial(turn: Mapping[str, Mapping[str, float]]) -> float:
    return turn[SERIAL]["seconds"] / turn[OPTIMISED]["seconds"]


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def plot(data: Data, path: Path) -> None:
    """Draws the median seconds of a step as bars."""
    found = medians(data["turns"])
    with figure(path, dpi=120, figsize=(8, 4), layout="constrained") as (_, axes):
        axes.barh(list(found)[::-1], [one["seconds"] for one in found.values()][::-1])
        axes.set_xlabel("seconds of a step")
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(about(data["machine"], quick=data["quick"]), fontsize=9)
