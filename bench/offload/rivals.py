"""What other systems would do with the same activations, as plans for our predictor (LoHan's paper, Fig. 9a).

Each is a function of a machine, a workload, a placement and a budget, for whole blocks. Weights and optimizer
states move as in LoHan, so only the plans of activations differ. None of these systems sees that traffic. A
plan may not fit into the budget; then the system would run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan, choices_of
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import memory_need
from mlora.offload.planner.search import plan_activations
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement
from scipy.optimize import Bounds, LinearConstraint, milp

Plan = Callable[[Machine, OffloadWorkload, StatePlacement, Budget], ActivationPlan]


def algorithm_1(
    machine: Machine, work: OffloadWorkload, place: StatePlacement, budget: Budget
) -> ActivationPlan:
    """Ours: LoHan's Algorithm 1, corrected (section IV-D; docs/decisions/39-offload-planner.md)."""
    return plan_activations(machine, work, place, budget).plan


def zero(machine: Machine, work: OffloadWorkload, place: StatePlacement, budget: Budget) -> ActivationPlan:
    """ZeRO-Infinity (Rajbhandari et al., SC 2021): activation checkpointing with CPU offload.

    What lies between blocks goes to the host, and all blocks are recomputed. LoHan's paper describes it so in
    section II, and profiles its own first iteration in this way.
    """
    return ActivationPlan((ActivationChoice.RECOMPUTE,) * len(work.blocks), _second_memory(machine))


def capuchin(
    machine: Machine, work: OffloadWorkload, place: StatePlacement, budget: Budget
) -> ActivationPlan:
    """Capuchin (Peng et al., ASPLOS 2020): swaps that computation hides come first, then recomputation.

    Only what does not fit leaves the device. Blocks are swapped to the host in the order of their free time:
    the time between a block's forward and backward pass, less the time of both transfers. This stops where
    the transfers of a pass take longer than its computation. Then blocks are recomputed in the order of the
    memory that they save per second.
    """
    tier, hidden = _second_memory(machine), _hidden(machine, work, place, budget)
    inner, seconds = [ActivationChoice.KEEP] * len(work.blocks), _backward(machine, work)
    free = _free_times(machine, work)
    taken = 0.0
    for index in sorted(range(len(inner)), key=lambda each: -free[each]):
        if _fits(machine, work, place, budget, inner, hidden):
            return ActivationPlan(tuple(inner), hidden)
        taken += _transfer(machine, work.blocks[index].inner_bytes)
        swapped = [*inner[:index], tier, *inner[index + 1 :]]
        if tier is ActivationChoice.KEEP or free[index] < 0 or taken > seconds:
            break
        if memory_need(machine, work, place, ActivationPlan(tuple(swapped), hidden)).host > budget.host:
            break
        inner = swapped
    kept = [index for index, choice in enumerate(inner) if choice is ActivationChoice.KEEP]
    saved = {i: work.blocks[i].inner_bytes / max(work.blocks[i].forward(machine), 1e-30) for i in kept}
    for index in sorted(kept, key=lambda each: -saved[each]):
        if _fits(machine, work, place, budget, inner, hidden):
            break
        inner[index] = ActivationChoice.RECOMPUTE
    return ActivationPlan(tuple(inner), hidden)


def g10(machine: Machine, work: OffloadWorkload, place: StatePlacement, budget: Budget) -> ActivationPlan:
    """G10 (Zhang et al., MICRO 2023): tensors move to flash or to the host, and nothing is recomputed.

    Only what does not fit leaves the device, the tensors that are inactive for longest first. They go to the
    disk while its bandwidth lasts for a pass, then to the host while there is room.
    """
    hidden = _hidden(machine, work, place, budget)
    inner, taken = [ActivationChoice.KEEP] * len(work.blocks), 0.0
    passes = min(sum(block.forward(machine) for block in work.blocks), _backward(machine, work))
    for index, block in enumerate(work.blocks):
        if _fits(machine, work, place, budget, inner, hidden):
            break
        taken += block.inner_bytes / min(machine.read, machine.write) if machine.has_disk else np.inf
        host = [*inner[:index], ActivationChoice.HOST, *inner[index + 1 :]]
        if taken > passes and ActivationChoice.HOST in choices_of(machine):
            need = memory_need(machine, work, place, ActivationPlan(tuple(host), hidden))
            if need.host <= budget.host or not machine.has_disk:
                inner = host
                continue
        inner[index] = ActivationChoice.DISK if machine.has_disk else ActivationChoice.KEEP
    return ActivationPlan(tuple(inner), hidden)


def checkmate(
    machine: Machine, work: OffloadWorkload, place: StatePlacement, budget: Budget
) -> ActivationPlan:
    """Checkmate (Jain et al., MLSys 2020): the least recomputation that fits, as a mixed-integer program.

    Nothing is swapped. Blocks form a chain of which all inputs are saved, so the program of its section 4 has
    one variable for each block: ``min Σ (1 - keep_i) forward_i`` with ``Σ keep_i inner_i <= memory``.
    """
    count = len(work.blocks)
    none = ActivationPlan((ActivationChoice.RECOMPUTE,) * count)
    room = budget.device - memory_need(machine, work, place, none).device
    if room < 0:
        return none
    if np.isinf(room):
        return ActivationPlan((ActivationChoice.KEEP,) * count)
    sizes = np.array([work.in_flight * block.inner_bytes for block in work.blocks])
    seconds = np.array([block.forward(machine) for block in work.blocks])
    unit, scale = max(sizes.max(), 1.0), max(seconds.max(), 1e-30)
    found = milp(
        -seconds / scale,
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(sizes / unit, ub=room / unit),
    )
    kept = np.round(found.x).astype(bool)
    return ActivationPlan(
        tuple(ActivationChoice.KEEP if keep else ActivationChoice.RECOMPUTE for keep in kept)
    )


RIVALS: dict[str, Plan] = {
    "Algorithm 1": algorithm_1,
    "ZeRO": zero,
    "Capuchin": capuchin,
    "G10": g10,
    "Checkmate": checkmate,
}
"""By the name that the report prints."""


def _second_memory(machine: Machine) -> ActivationChoice:
    """Returns the host; with one memory the disk, which takes its part."""
    known = choices_of(machine)
    return next(
        (choice for choice in (ActivationChoice.HOST, ActivationChoice.DISK) if choice in known),
        ActivationChoice.KEEP,
    )


def _fits(
    machine: Machine,
    work: OffloadWorkload,
    place: StatePlacement,
    budget: Budget,
    inner: Sequence[ActivationChoice],
    hidden: ActivationChoice,
) -> bool:
    return memory_need(machine, work, place, ActivationPlan(tuple(inner), hidden)).device <= budget.device


def _hidden(
    machine: Machine, work: OffloadWorkload, place: StatePlacement, budget: Budget
) -> ActivationChoice:
    """Returns `keep` if what lies between blocks fits onto the device beside nothing else."""
    nothing = [ActivationChoice.RECOMPUTE] * len(work.blocks)
    fits = _fits(machine, work, place, budget, nothing, ActivationChoice.KEEP)
    return ActivationChoice.KEEP if fits else _second_memory(machine)


def _backward(machine: Machine, work: OffloadWorkload) -> float:
    return sum(work.backward(machine, block) for block in work.blocks)


def _transfer(machine: Machine, size: float) -> float:
    """Returns the seconds of the slower way, to the second memory or back."""
    rates = (machine.read, machine.write) if machine.one_memory else (machine.to_host, machine.to_device)
    return size / min(rates) if min(rates) else np.inf


def _free_times(machine: Machine, work: OffloadWorkload) -> list[float]:
    """Returns each block's seconds between forward and backward, less those of its transfers."""
    found, between = [], 0.0
    for block in reversed(work.blocks):
        found.append(between - 2 * _transfer(machine, block.inner_bytes))
        between += block.forward(machine) + work.backward(machine, block)
    return found[::-1]
