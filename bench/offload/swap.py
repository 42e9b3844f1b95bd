"""Parts `swap` and `activations`: seconds of a step by what becomes of activations (LoHan, Fig. 9b, 8).

`swap` compares them with what the planner predicts from a profile and the disk's rates.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mlora.offload.activations import Activations, Mode
from mlora.offload.disk import Disk
from mlora.offload.forecast import watched_workload
from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan
from mlora.offload.planner.iteration_time import iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import memory_need
from mlora.offload.planner.search import Case, PlannedActivations, plan_activations
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement
from mlora.offload.rates import measure_machine
from mlora.offload.swap_space import WRITING, SwapSpace
from shared.counting import live_peak
from shared.harness import SECONDS, Data, Found, Panel, Target, table
from shared.timing import Turn, alternate, cores, in_order, medians, ratio
from torch import Tensor
from transformers import LlamaForCausalLM

from offload.base import FULL_SHAPE, QUICK_FULL, random_llama, random_tokens, sizes_of

PLACE = StatePlacement(base="device", optimizer="device")
CHOICES: dict[ActivationChoice, Mode] = {
    ActivationChoice.KEEP: "keep",
    ActivationChoice.RECOMPUTE: "recompute",
    ActivationChoice.DISK: "swap",
}


@dataclass(frozen=True)
class Step:
    """Seconds of a forward and a backward pass; the loss, and a sum over one gradient of the first block."""

    seconds: float
    loss: float
    gradient: float


class Swapping:
    """Runs forward and backward passes, all weights trained, without an optimizer.

    Args:
        model: in memory.
        folder: for scratch files.
        rate: bytes per second of all transfers together, a stand-in for a slower disk; 0 = no bound.
        writing: bytes that wait to be written at once. What has not been written when the backward pass wants
            it is not read, so that a small model hardly sees a slow disk. The planner expects one block.

    Attributes:
        blocks: how many there are.
    """

    def __init__(
        self, model: LlamaForCausalLM, folder: Path, rate: float = 0.0, writing: int = WRITING
    ) -> None:
        self.disk = Disk([folder], rate=rate)
        self._model, self._space = model, SwapSpace(self.disk, writing=writing)
        layers = list(model.model.layers)
        self.blocks = len(layers)
        self._first: Tensor = next(layers[0].parameters())
        self._activations = Activations(model, layers, self._space)

    def close(self) -> None:
        """Gives the model back as it was."""
        self._activations.remove()

    def step(self, modes: Sequence[Mode], ids: Tensor) -> Step:
        """Runs a step; `modes` say of each block whether to keep, recompute or swap."""
        self._activations.choose(modes)
        begin = time.perf_counter()
        loss = self._passes(ids)
        return self._ended(loss, time.perf_counter() - begin)

    def workload(self, machine: Machine, ids: Tensor) -> tuple[OffloadWorkload, Step]:
        """Runs a step as `activations: auto` profiles one; returns what the planner sees, and the step."""
        self._activations.watch(swaps=True)
        begin = time.perf_counter()
        loss = self._passes(ids)
        times, seconds = self._activations.times(), time.perf_counter() - begin
        seen = watched_workload(machine, self._activations, times, None, ids.numel(), trained=[], used=0)
        return seen, self._ended(loss, seconds)

    def bytes_of_blocks(self, ids: Tensor) -> list[int]:
        """Returns the bytes that autograd saves in each block, which a swap moves."""
        self._activations.saved.counts = True
        self.step(["keep"] * self.blocks, ids)
        self._activations.saved.counts = False
        return [self._activations.saved.counted[number] for number in range(self.blocks)]

    @property
    def buffers(self) -> int:
        """Bytes of memory that swapped activations pass through."""
        return self._space.memory.nbytes

    def _passes(self, ids: Tensor) -> Tensor:
        with self._activations.of_pass():
            loss: Tensor = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def _ended(self, loss: Tensor, seconds: float) -> Step:
        assert self._first.grad is not None
        gradient = self._first.grad.double().sum().item()
        self._model.zero_grad()
        return Step(seconds, loss.item(), gradient)


def plan_of(swapped: int, blocks: int) -> ActivationPlan:
    """Returns the plan that swaps the first blocks and recomputes the others."""
    inner = [ActivationChoice.DISK] * swapped + [ActivationChoice.RECOMPUTE] * (blocks - swapped)
    return ActivationPlan((*inner, ActivationChoice.KEEP))


def modes_of(plan: ActivationPlan) -> list[Mode]:
    """Returns what a plan says of each block, in the words of `offloaded`."""
    return [CHOICES[choice] for choice in plan.inner[:-1]]


def case_of(machine: Machine, workload: OffloadWorkload) -> Case:
    """Returns the paper's case: how many blocks to swap, if all others are recomputed."""
    blocks = len(workload.blocks) - 1
    seconds = [predicted(machine, workload, plan_of(count, blocks)) for count in range(blocks + 1)]
    best = seconds.index(min(seconds))
    if best == 0:
        return Case.TRANSFER
    return Case.COMPUTE if best == blocks else Case.INFLECTION


def predicted(machine: Machine, workload: OffloadWorkload, plan: ActivationPlan) -> float:
    """Returns the planner's seconds of a step."""
    return iteration_time(machine, workload, PLACE, plan).seconds


def chosen(machine: Machine, workload: OffloadWorkload) -> PlannedActivations:
    """Returns the planner's plan where there is the memory that swapping all blocks takes."""
    blocks = len(workload.blocks) - 1
    need = memory_need(machine, workload, PLACE, plan_of(blocks, blocks))
    return plan_activations(machine, workload, PLACE, Budget(device=need.device), hidden_stays=True)


BLOCKS = 12
TOKENS, QUICK_TOKENS = 768, 64
LENGTHS, QUICK_LENGTHS = (1024, 2048), (64, 128)
"""Tokens where nothing, everything or no block is kept."""
MODES: tuple[Mode, ...] = ("keep", "recompute", "swap")
SWAPPED, QUICK_SWAPPED = (0, 2, 3, 5, 7, 8, 10, 12), (0, 1, 2, 4)
MUST_BUSY, MUST_FREE, MUST_BEST = 0.10, 0.05, 1.05
PLANNED = "planned"
SLOWER = "throttled: swapping all takes 1.5 forward passes"
SLOWEST = "throttled: a block takes longer than it saves"
FEW, THROTTLED = 3, 3
"""Values that are measured on the slowest disk, where each takes long; turns with a throttled disk."""


def run(options: argparse.Namespace) -> Found:
    """Measures all numbers of swapped blocks in turns, and each turn's prediction.

    Raises:
        OSError: the file system lacks room.
        RuntimeError: losses or gradients of two plans differ.
    """
    shape = QUICK_FULL if options.quick else replace(FULL_SHAPE, layers=BLOCKS)
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
    throttled = {}
    for name, (rate, few) in rates.items():
        times = min(THROTTLED, options.turns)
        taken = _throttled(model, options.folder, rate, few, sizes, ids, times)
        throttled[name] = {"rate": rate, "turns": taken}
    lines = [
        f"forward and backward pass of full tuning, without an optimizer: {sizes_of(shape)}, "
        f"{tokens} tokens; "
        f"{sizes[0] / 1e6:.0f} MB of activations in a block, {sum(sizes) / 1e9:.2f} GB; blocks that are not "
        "swapped are recomputed",
        "predicted: the planner's, from a step as `activations: auto` profiles one and the disk's rates and "
        "processor seconds, both measured in the same turn",
    ]
    must, sections = [], {}
    for key, found in turns.items():
        free = int(key) < cores()
        bound, how = (MUST_FREE, "a core free") if free else (MUST_BUSY, "all cores computing")
        sections[f"this disk, {key} of {cores()} cores compute"] = found
        must += [
            Target(f"worst median error of the prediction, {how}", worst_error(found, counts), most=bound),
            Target(f"planned / fastest, {how}", over_best(found), most=MUST_BEST),
        ]
    for name, one in throttled.items():
        sections[f"{name}, a stand-in of {one['rate'] / 1e6:.0f} MB/s"] = one["turns"]
    for name, found in sections.items():
        lines += ["", f"{name}, turns: {len(found)}", *_section(found)]
    data = {"shape": shape.options, "tokens": tokens, "cores": cores(), "bytes": sizes, "counts": counts}
    panels = [_panel(name, found) for name, found in sections.items()]
    return Found(data | {"threads": turns, "throttled": throttled}, lines, must, panels)


def _panel(name: str, turns: Sequence[Data]) -> Panel:
    series = {
        key: {int(n): median(turn[key][n] for turn in turns) for n in turns[0][key] if n != PLANNED}
        for key in ("measured", "predicted")
    }
    return Panel("seconds of a step", series, name, "swapped blocks", bars=False)


def activations(options: argparse.Namespace) -> Found:
    """Measures activations kept, recomputed or swapped: seconds and memory of a step (Fig. 8)."""
    shape = QUICK_FULL if options.quick else replace(FULL_SHAPE, layers=BLOCKS)
    swapping, sections = Swapping(random_llama(shape), options.folder), {}
    lines = [
        f"forward and backward pass of full tuning, without an optimizer: {sizes_of(shape)}, "
        f"{torch.get_num_threads()} threads",
        "peak: the most memory that a step allocates at once beyond the weights, and the buffers of "
        "swaps; it "
        "has all gradients of weights in it at the end",
    ]
    columns = (*SECONDS, ("of keep", "over", "7.2f", 1.0), ("peak MiB", "peak", "8.0f", 2.0**-20))
    for tokens in QUICK_LENGTHS if options.quick else LENGTHS:
        turns, peaks = _kept_or_not(swapping, random_tokens(tokens, shape.vocabulary), options.turns)
        rows = {m: r | {"peak": peaks[m], "over": ratio(turns, m, "keep")} for m, r in medians(turns).items()}
        sections[str(tokens)] = {"turns": turns, "peaks": peaks}
        lines += ["", f"{tokens} tokens", *table(rows, columns)]
    swapping.close()
    lines += ["", "losses and gradients of all ways were equal to the last bit"]
    return Found({"shape": shape.options, "threads": torch.get_num_threads(), "tokens": sections}, lines)


def _kept_or_not(swapping: Swapping, ids: Tensor, turns: int) -> tuple[list[Turn], dict[str, int]]:
    """Returns the turns of all ways, and the memory of a step of each."""
    found: dict[str, Step] = {}

    def step(mode: Mode) -> None:
        found[mode] = swapping.step([mode] * swapping.blocks, ids)

    cases = {mode: partial(step, mode) for mode in MODES}
    taken = alternate(cases, turns)
    peaks = {mode: live_peak(case) for mode, case in cases.items()}
    peaks["swap"] += swapping.buffers
    _check_equal(found["keep"], found)
    return taken, peaks


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
            raise RuntimeError(f"{name}: loss or gradient differ from those of another way")


def errors(turns: Sequence[Data], name: str) -> list[float]:
    """Returns prediction over measurement, less 1, in each turn."""
    return [turn["predicted"][name] / turn["measured"][name] - 1 for turn in turns]


def worst_error(turns: Sequence[Data], counts: Sequence[int]) -> float:
    """Returns the largest of the median errors of all numbers of swapped blocks."""
    return max(abs(median(errors(turns, str(count)))) for count in counts)


def over_best(turns: Sequence[Data]) -> float:
    """Returns the median of the planned step's seconds over those of the fastest one measured."""
    return median(turn["measured"][PLANNED] / min(turn["measured"].values()) for turn in turns)


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
