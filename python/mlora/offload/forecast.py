"""Predicts a step's time from one watched micro-batch, and plans what becomes of the activations.

LoHan (arXiv 2403.06504), section IV-B: the first iteration recomputes all blocks, and measures what the plan
needs. Here some blocks keep their activations meanwhile (`Activations.watch`), so that their bytes can be
counted, and that it is seen what recomputation costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mlora.offload.activations import Activations, BlockTimes, Mode
from mlora.offload.disk import Disk
from mlora.offload.forecast_lines import Forecast
from mlora.offload.options import STATE_BYTES, OffloadOptions
from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan
from mlora.offload.planner.iteration_time import iteration_time
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.search import plan_activations
from mlora.offload.planner.tokens_to_hide import tokens_of_passes
from mlora.offload.planner.workload import Block, OffloadWorkload, StatePlacement, Update
from mlora.offload.rates import measure_machine
from mlora.offload.stream import BlockStream


def forecast(
    activations: Activations,
    stream: BlockStream | None,
    options: OffloadOptions,
    tokens: int,
    *,
    trained: Sequence[int],
    update: Update,
    in_flight: int,
    used: int,
    free: int,
) -> Forecast:
    """Predicts the time of a micro-batch after the watched one, and sets the blocks' modes.

    Args:
        activations: that were watched.
        stream: of the blocks' weights, if they are on disk.
        options: of the run.
        tokens: of the watched micro-batch.
        trained: weights of each block, and of the rest of the model, that are updated with states on disk;
            empty: none.
        update: when they are.
        in_flight: micro-batches that hold activations at once.
        used: bytes of memory that the process uses now.
        free: bytes that others do not use.

    Raises:
        ValueError: the memory is too small for any plan.
        OSError: a folder for scratch files lacks room.
    """
    times = activations.times()  # ends the watch
    machine = measure_machine(Disk(options.folders, rate=options.rate))
    workload = watched_workload(machine, activations, times, stream, tokens, trained=trained, used=used)
    workload = replace(workload, in_flight=in_flight)
    placement = StatePlacement(
        base="device" if stream is None else "disk",
        optimizer="disk" if options.optimizer == "disk" else "device",
        slots=options.slots,
        update=update,
    )
    if options.activations == "auto":
        budget = Budget(options.device_memory or used + free)
        planned = plan_activations(machine, workload, placement, budget, hidden_stays=True)
        plan, case = planned.plan, str(planned.case)
    else:
        inner = [_CHOICES[mode] for mode in activations.before]
        plan, case = ActivationPlan((*inner, ActivationChoice.KEEP)), ""
    modes = [_MODES[choice] for choice in plan.inner[:-1]]
    activations.choose(modes)
    time = iteration_time(machine, workload, placement, plan)
    return Forecast(
        tokens,
        time.seconds,
        str(time.bound),
        math.ceil(tokens_of_passes(machine, workload, placement).tokens),
        dict(Counter(modes)),
        case,
    )


_CHOICES: dict[Mode, ActivationChoice] = {
    "keep": ActivationChoice.KEEP,
    "recompute": ActivationChoice.RECOMPUTE,
    "swap": ActivationChoice.DISK,
}
_MODES = {choice: mode for mode, choice in _CHOICES.items()}


def watched_workload(
    machine: Machine,
    activations: Activations,
    times: BlockTimes,
    stream: BlockStream | None,
    tokens: int,
    *,
    trained: Sequence[int],
    used: int,
) -> OffloadWorkload:
    """Returns the micro-batch that was watched: its blocks, and one for what is computed around them.

    A block's input is among its inner bytes, since a swap moves it, too.
    """
    inner = activations.saved_bytes
    swapped = [number for number, mode in enumerate(activations.modes) if mode == "swap"]
    for number in swapped:
        times.forward[number] -= inner * machine.copy_seconds  # the planner adds them
    blocks = []
    for number, (forward, backward, again) in enumerate(passes_of(times, activations.modes)):
        weights = trained[number] if trained else 0
        blocks.append(
            replace(
                _trained(weights),
                weight_bytes=0 if stream is None else stream.layouts[number].nbytes,
                inner_bytes=inner,
                hidden_bytes=activations.hidden_bytes,
                forward_seconds=forward,
                backward_seconds=backward,
                recompute_seconds=again,
            )
        )
    rest = trained[-1] if trained else 0
    around = max(times.around, _SHORTEST)
    blocks.append(replace(_trained(rest), forward_seconds=around, backward_seconds=_SHORTEST))
    resident = used - (0 if stream is None else stream.nbytes)
    return OffloadWorkload(blocks, tokens, method="full" if trained else "lora", resident_bytes=resident)


def _trained(weights: int) -> Block:
    """Returns what the update of so many weights needs."""
    return Block(trainable=weights, state_bytes=STATE_BYTES * weights, gradient_bytes=2 * weights)


def passes_of(times: BlockTimes, modes: Sequence[Mode]) -> list[tuple[float, float, float]]:
    """Returns each block's seconds: forward, backward, and what recomputation adds to both.

    Some blocks kept their activations, the others recomputed them. A forward pass that keeps nothing takes
    less time, so recomputation adds less than a forward pass. The means of both kinds say how much less.
    """
    both = [forward + backward for forward, backward in zip(times.forward, times.backward, strict=True)]
    kept = [number for number, mode in enumerate(modes) if mode != "recompute"]
    again = [number for number, mode in enumerate(modes) if mode == "recompute"]
    slower = saved = 1.0
    if kept and again:
        slower = _mean(times.forward, kept) / _mean(times.forward, again)
        saved = min(1.0, _mean(both, kept) / _mean(both, again))
    found = []
    for number, (forward, whole) in enumerate(zip(times.forward, both, strict=True)):
        if number in again:
            forward, needed = min(forward * slower, saved * whole), saved * whole
        else:
            needed, whole = whole, whole / saved
        parts = forward, needed - forward, whole - needed
        found.append((max(parts[0], _SHORTEST), max(parts[1], _SHORTEST), max(parts[2], _SHORTEST)))
    return found


def _mean(values: Sequence[float], places: Sequence[int]) -> float:
    return max(_SHORTEST, sum(values[place] for place in places) / len(places))


_SHORTEST = 1e-9
"""Seconds; 0 would mean that a pass was not measured."""
