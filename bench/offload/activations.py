"""Part `activations`: activations kept, recomputed or swapped: seconds and memory of a step (Fig. 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shared.counting import live_peak
from shared.figures import about, figure

from offload.full_model import QUICK_SHAPE, SHAPE, random_llama, random_tokens
from offload.options import Options
from offload.report import SECONDS, Data, table
from offload.swapping import Step, Swapping
from offload.turns import Turn, medians, ratios, take_turns

BLOCKS = 12
TOKENS, QUICK_TOKENS = (1024, 2048), (64, 128)
KEEP, RECOMPUTE, SWAP = "keep", "recompute", "swap"


def run(options: Options) -> dict[str, Any]:
    """Measures all ways in turns, at several numbers of tokens.

    Raises:
        OSError: the file system lacks room.
        RuntimeError: losses or gradients of two ways differ.
    """
    shape = QUICK_SHAPE if options.quick else replace(SHAPE, layers=BLOCKS)
    swapping = Swapping(random_llama(shape), options.folder)
    try:
        sections = {
            str(tokens): _section(swapping, tokens, shape.vocabulary, options.turns)
            for tokens in (QUICK_TOKENS if options.quick else TOKENS)
        }
    finally:
        swapping.close()
    return {
        "shape": shape.options,
        "threads": torch.get_num_threads(),
        "tokens": sections,
        "must": [],
    }


def _section(swapping: Swapping, tokens: int, vocabulary: int, turns: int) -> dict[str, Any]:
    """Returns the turns with so many tokens, and the memory of a step of each way."""
    ids = random_tokens(tokens, vocabulary)
    found: dict[str, Step] = {}

    def step(mode: str) -> None:
        found[mode] = swapping.step([mode] * swapping.blocks, ids)

    cases: dict[str, Callable[[], object]] = {mode: partial(step, mode) for mode in (KEEP, RECOMPUTE, SWAP)}
    taken = take_turns(cases, turns)
    peaks = {mode: live_peak(case) for mode, case in cases.items()}
    peaks[SWAP] += swapping.buffers
    for mode, one in found.items():
        if (one.loss, one.gradient) != (found[KEEP].loss, found[KEEP].gradient):
            raise RuntimeError(f"{mode}: loss or gradient differ from those of kept activations")
    return {"saved": sum(swapping.bytes_of_blocks(ids)), "turns": taken, "peaks": peaks}


def rows(section: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns medians of each way, its memory, and its seconds over those of kept activations."""
    turns: list[Turn] = section["turns"]
    return {
        mode: row | {"peak": section["peaks"][mode], "over": median(ratios(turns, mode, KEEP))}
        for mode, row in medians(turns).items()
    }


def text(data: Data) -> list[str]:
    """Returns a table for each number of tokens."""
    shape = data["shape"]
    lines = [
        f"forward and backward pass of full tuning, without an optimizer: Llama {shape['hidden_size']}/"
        f"{shape['intermediate_size']}, {shape['num_hidden_layers']} blocks, {data['threads']} threads",
        "peak: the most memory that a step allocates at once beyond the weights, and the buffers of swaps; "
        "it has all gradients of weights in it at the end",
    ]
    columns = (*SECONDS, ("of keep", "over", "7.2f", 1.0), ("peak MiB", "peak", "8.0f", 2.0**-20))
    for tokens, section in data["tokens"].items():
        saved = section["saved"] / 2**20
        lines += ["", f"{tokens} tokens; autograd saves {saved:.0f} MiB", *table(rows(section), columns)]
    return [*lines, "", "losses and gradients of all ways were equal to the last bit"]


def plot(data: Data, path: Path) -> None:
    """Draws seconds and memory against tokens."""
    counts = [int(tokens) for tokens in data["tokens"]]
    with figure(path, 1, 2, dpi=120, figsize=(9, 4), layout="constrained") as (whole, panels):
        for axes, (key, factor, label) in zip(
            panels, (("seconds", 1.0, "seconds of a step"), ("peak", 2.0**-30, "peak, GiB")), strict=True
        ):
            for mode in (KEEP, RECOMPUTE, SWAP):
                values = [rows(section)[mode][key] * factor for section in data["tokens"].values()]
                axes.plot(counts, values, "o-", label=mode)
            axes.set_xlabel("tokens")
            axes.set_ylabel(label)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        panels[0].legend()
        whole.suptitle(about(data["machine"], quick=data["quick"]), fontsize=9)
