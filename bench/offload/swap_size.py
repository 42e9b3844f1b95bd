"""Part `swap`: a step's seconds by the number of swapped blocks, and the planner's prediction (Fig. 9b)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mlora.offload.rates import measure_machine
from shared.figures import about, figure
from torch import Tensor

from offload.full_model import QUICK_SHAPE, SHAPE, random_llama, random_tokens
from offload.options import Options
from offload.report import Data, at_most, table
from offload.swapping import Step, Swapping, case_of, chosen, modes_of, plan_of, predicted
from offload.turns import cores, in_order

BLOCKS = 12
TOKENS, QUICK_TOKENS = 768, 64
SWAPPED, QUICK_SWAPPED = (0, 2, 3, 5, 7, 8, 10, 12), (0, 1, 2, 4)
MUST_BUSY, MUST_FREE, MUST_BEST = 0.10, 0.05, 1.05
PLANNED = "planned"
NO_BOUND = "this disk"
SLOWER = "throttled: swapping all takes 1.5 forward passes"
SLOWEST = "throttled: a block takes longer than it saves"
FEW, THROTTLED = 3, 3
"""Values that are measured on the slowest disk, where each takes long; turns with a throttled disk."""


def run(options: Options) -> dict[str, Any]:
    """Measures all numbers of swapped blocks in turns, and each turn's prediction.

    Raises:
        OSError: the file system lacks room.
        RuntimeError: losses or gradients of two plans differ.
    """
    shape = QUICK_SHAPE if options.quick else replace(SHAPE, layers=BLOCKS)
    tokens = QUICK_TOKENS if options.quick else TOKENS
    counts = QUICK_SWAPPED if options.quick else SWAPPED
    model, ids = random_llama(shape), random_tokens(tokens, shape.vocabulary)
    counting = Swapping(model, options.folder)
    sizes = counting.bytes_of_blocks(ids)
    counting.close()
    swapping = Swapping(model, options.folder, writing=max(sizes))
    for mode in ("swap", "recompute"):
        swapping.step([mode] * len(sizes), ids)  # type: ignore[list-item]
    threads = sorted({cores(), max(1, cores() - 1)}, reverse=True)
    turns: dict[str, list[dict[str, Any]]] = {str(number): [] for number in threads}
    for turn in range(options.turns):
        for number in threads:
            torch.set_num_threads(number)
            turns[str(number)].append(_turn(swapping, counts, sizes, ids, turn))
    torch.set_num_threads(cores())
    blocks = swapping.workload(measure_machine(swapping.disk), ids)[0].blocks[:-1]
    swapping.close()
    forward = sum(block.forward_seconds for block in blocks)
    rates = {
        SLOWER: (sum(sizes) / (1.5 * forward), counts),
        SLOWEST: (0.8 * sizes[0] / (forward + blocks[0].recompute_seconds), counts[:FEW]),
    }
    throttled = {
        name: {
            "rate": rate,
            "turns": _throttled(model, options.folder, rate, few, sizes, ids, min(THROTTLED, options.turns)),
        }
        for name, (rate, few) in rates.items()
    }
    data = {
        "shape": shape.options,
        "tokens": tokens,
        "cores": cores(),
        "bytes": sizes,
        "counts": counts,
        "threads": turns,
        "throttled": throttled,
    }
    return data | {"must": _must(data)}


def _throttled(
    model: Any,
    folder: Path,
    rate: float,
    counts: Sequence[int],
    sizes: Sequence[int],
    ids: Tensor,
    turns: int,
) -> list[dict[str, Any]]:
    swapping = Swapping(model, folder, rate, max(sizes))
    try:
        return [_turn(swapping, counts, sizes, ids, turn) for turn in range(turns)]
    finally:
        swapping.close()


def _turn(
    swapping: Swapping, counts: Sequence[int], sizes: Sequence[int], ids: Tensor, turn: int
) -> dict[str, Any]:
    """Measures the machine, then all numbers of swapped blocks, then the planner's choice."""
    blocks = len(sizes)
    machine = measure_machine(swapping.disk)
    swapping.step(["recompute"] * swapping.blocks, ids)
    work, profile = swapping.workload(machine, ids)
    plans = {str(count): plan_of(count, blocks) for count in counts}
    planned = chosen(machine, work)
    plans[PLANNED] = planned.plan
    taken = {name: swapping.step(modes_of(plans[name]), ids) for name in in_order(plans, turn)}
    _check_equal(profile, taken)
    return {
        "measured": {name: taken[name].seconds for name in plans},
        "predicted": {name: predicted(machine, work, plan) for name, plan in plans.items()},
        "plan": modes_of(planned.plan),
        "case": case_of(machine, work).value,
        "machine": {name: getattr(machine, name) for name in _SHOWN},
        "profile": {
            name: sum(getattr(block, f"{name}_seconds") for block in work.blocks[:-1]) for name in _PARTS
        },
    }


_SHOWN = ("read", "write", "read_seconds", "write_seconds", "copy_seconds", "compute_cores")


_PARTS = ("forward", "backward", "recompute")


def _check_equal(profile: Step, taken: Mapping[str, Step]) -> None:
    for name, one in taken.items():
        if (one.loss, one.gradient) != (profile.loss, profile.gradient):
            raise RuntimeError(f"{name}: loss or gradient differ from those of the profile")


def errors(turns: Sequence[Data], name: str) -> list[float]:
    """Returns prediction over measurement, less 1, in each turn."""
    return [turn["predicted"][name] / turn["measured"][name] - 1 for turn in turns]


def worst_error(turns: Sequence[Data], counts: Sequence[int]) -> float:
    """Returns the largest of the median errors of all numbers of swapped blocks."""
    return max(abs(median(errors(turns, str(count)))) for count in counts)


def over_best(turns: Sequence[Data]) -> float:
    """Returns the median of the planned step's seconds over those of the fastest one measured."""
    return median(turn["measured"][PLANNED] / min(turn["measured"].values()) for turn in turns)


def _must(data: Data) -> list[dict[str, Any]]:
    found = []
    for number, turns in data["threads"].items():
        free = int(number) < data["cores"]
        bound, how = (MUST_FREE, "a core free") if free else (MUST_BUSY, "all cores computing")
        worst = worst_error(turns, data["counts"])
        found += [
            at_most(f"worst median error of the prediction, {how}", worst, bound),
            at_most(f"planned / fastest, {how}", over_best(turns), MUST_BEST),
        ]
    return found


def text(data: Data) -> list[str]:
    """Returns tables of measured and predicted seconds by the number of swapped blocks."""
    shape = data["shape"]
    lines = [
        f"forward and backward pass of full tuning, without an optimizer: Llama {shape['hidden_size']}/"
        f"{shape['intermediate_size']}, {shape['num_hidden_layers']} blocks, {data['tokens']} tokens; "
        f"{data['bytes'][0] / 1e6:.0f} MB of activations in a block, {sum(data['bytes']) / 1e9:.2f} GB; "
        "blocks that are not swapped are recomputed",
        "predicted: the planner's, from a step as `activations: auto` profiles one and the disk's rates and "
        "processor seconds, both measured in the same turn",
    ]
    for number, turns in data["threads"].items():
        lines += ["", f"{NO_BOUND}, {number} of {data['cores']} cores compute", *_section(turns)]
        lines.append(
            f"worst error of a swap size {worst_error(turns, data['counts']):.1%}; planned / fastest "
            f"{over_best(turns):.2f}"
        )
    for name, found in data["throttled"].items():
        title = f"{name}, a stand-in of {found['rate'] / 1e6:.0f} MB/s, turns: {len(found['turns'])}"
        lines += ["", title, *_section(found["turns"])]
    return lines


def _section(turns: Sequence[Data]) -> list[str]:
    rows = {}
    for name in turns[0]["measured"]:
        values = {key: median(turn[key][name] for turn in turns) for key in ("measured", "predicted")}
        label = name if name == PLANNED else f"{name} swapped"
        rows[label] = values | {"error": median(errors(turns, name))}
    columns = (
        ("measured s", "measured", "8.3f", 1.0),
        ("predicted s", "predicted", "8.3f", 1.0),
        ("error %", "error", "7.1f", 100.0),
    )
    rates = " and ".join(
        f"{way} {median(turn['machine'][way] for turn in turns) / 1e9:.2f} GB/s" for way in ("read", "write")
    )
    return [
        *table(rows, columns),
        f"disk: {rates}; planned: {_most_often([_counted(turn['plan']) for turn in turns])}",
        f"case: {_most_often([turn['case'] for turn in turns])}",
    ]


def _counted(plan: Sequence[str]) -> str:
    return ", ".join(f"{mode} {plan.count(mode)}" for mode in sorted(set(plan)))


def _most_often(found: Sequence[str]) -> str:
    """Returns what was found, with the number of turns where they differ."""
    counts = Counter(found).most_common()
    return found[0] if len(counts) == 1 else "; ".join(f"{what} ({count} turns)" for what, count in counts)


def plot(data: Data, path: Path) -> None:
    """Draws measured and predicted seconds against the number of swapped blocks."""
    threads = {number: f"{number} thread{'s' * (number != '1')}" for number in data["threads"]}
    sections = {threads[number]: turns for number, turns in data["threads"].items()}
    sections |= {name: found["turns"] for name, found in data["throttled"].items()}
    with figure(path, 1, len(sections), dpi=120, figsize=(4 * len(sections), 4), layout="constrained") as (
        whole,
        panels,
    ):
        for axes, (name, turns) in zip(panels, sections.items(), strict=True):
            counts = [int(each) for each in turns[0]["measured"] if each != PLANNED]
            for key, style in (("measured", "o-"), ("predicted", "x--")):
                values = [median(turn[key][str(count)] for turn in turns) for count in counts]
                axes.plot(counts, values, style, label=key)
            axes.set_ylim(0, 1.08 * axes.dataLim.y1)
            axes.set_title(name, fontsize=8)
            axes.set_xlabel("swapped blocks")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("seconds of a step")
        panels[0].legend()
        whole.suptitle(about(data["machine"], quick=data["quick"]), fontsize=9)
