"""Chooses what becomes of each block's activations (paper, section IV-D, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, product

from mlora.offload.planner.activation_plan import ActivationChoice, ActivationPlan
from mlora.offload.planner.candidates import PlanCandidate, Problem
from mlora.offload.planner.iteration_time import IterationTime, time_of_amounts
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import PlanMemory
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement

PAIRS = 32
"""Up to so many kinds of blocks, two are changed at once."""

ORDER = (ActivationChoice.DISK, ActivationChoice.HOST, ActivationChoice.RECOMPUTE, ActivationChoice.KEEP)
"""Of equal blocks, the first ones have the longest time between forward and backward."""

STARTS = 6
"""The local search goes on from so many plans."""


class Case(StrEnum):
    """Why a plan swaps as much as it does: the three cases of the paper, and two of a memory's size."""

    TRANSFER = "transfer-bound: swap at most what lies between blocks"
    COMPUTE = "compute-bound: swap all"
    INFLECTION = "swap up to the inflection"
    MEMORY = "swap as much as there is room for"
    FITS = "everything fits: keep all"


@dataclass(frozen=True)
class PlannedActivations:
    """A plan with its predicted time, the memory that it takes, and why it swaps as much as it does."""

    plan: ActivationPlan
    time: IterationTime
    need: PlanMemory
    case: Case


def plan_activations(
    machine: Machine,
    workload: OffloadWorkload,
    placement: StatePlacement,
    budget: Budget | None = None,
    *,
    hidden_stays: bool = False,
) -> PlannedActivations:
    """Returns the plan with the shortest predicted step that stays within the budget.

    The step's time is convex in what is swapped, in the order of the blocks' offloading benefits. So the
    plans along this order hold the best one for equal blocks (Algorithm 1). Blocks that differ are not
    divisible, and there are two tiers: a local search then changes one or two blocks at a time while this
    makes the step shorter. Equal inputs give equal plans.

    Args:
        machine: its rates.
        workload: what is trained.
        placement: where weights and states live.
        budget: of memory; default: endless, so that everything is kept.
        hidden_stays: what lies between blocks is kept in every plan.

    Raises:
        ValueError: even the smallest plan takes more memory than the budget.
    """
    problem = Problem(machine, workload, placement, budget or Budget())
    tiers = [chosen for count in range(3) for chosen in combinations(problem.tiers, count)]
    places = (ActivationChoice.KEEP,) if hidden_stays else (ActivationChoice.KEEP, *problem.tiers)
    ways = product(places, tiers, (False, True))
    walks = [list(problem.walk(hidden, used, largest_stay=stay)) for hidden, used, stay in ways]
    starts = {start.plan: start for walk in walks if math.isfinite((start := _best(walk)).seconds)}
    if not starts:
        raise ValueError(_too_small(problem))
    promising = sorted(starts.values(), key=lambda each: each.seconds)[:STARTS]
    best = _best([_improved(problem, start) for start in promising])
    time = time_of_amounts(problem.costs, best.amounts)
    case = _case(problem, best)
    return PlannedActivations(_arranged(problem, best.plan), time, problem.need(best.amounts), case)


def _best(candidates: Sequence[PlanCandidate]) -> PlanCandidate:
    """Returns the fastest plan; of equal ones the first."""
    best = candidates[0]
    for found in candidates:
        if found.beats(best):
            best = found
    return best


def _improved(problem: Problem, best: PlanCandidate) -> PlanCandidate:
    """Returns the plan after changes of one or two blocks, the best one first, until none helps."""
    while True:
        better = best
        for found in _neighbours(problem, best):
            if math.isfinite(found.seconds) and found.beats(better):
                better = found
        if better is best:
            return best
        best = better


def _neighbours(problem: Problem, plan: PlanCandidate) -> Iterator[PlanCandidate]:
    """Yields plans that differ in one block, or in two; one of each kind stands for its equals."""
    kinds: dict[tuple[int, ActivationChoice], int] = {}
    for index, (kind, choice) in enumerate(zip(problem.kinds, plan.plan.inner, strict=True)):
        kinds.setdefault((kind, choice), index)
    for index in kinds.values():
        for choice in problem.choices:
            if choice is not plan.plan.inner[index]:
                yield problem.changed(plan, {index: choice})
    if len(kinds) > PAIRS:
        return
    for first, second in combinations(kinds.values(), 2):
        for choices in product(problem.choices, repeat=2):
            if choices[0] is not plan.plan.inner[first] and choices[1] is not plan.plan.inner[second]:
                yield problem.changed(plan, {first: choices[0], second: choices[1]})


def _arranged(problem: Problem, plan: ActivationPlan) -> ActivationPlan:
    """Returns the plan with the choices of equal blocks in order: first those that need the longest time."""
    inner = list(plan.inner)
    for kind in set(problem.kinds):
        equal = [index for index, each in enumerate(problem.kinds) if each == kind]
        for index, choice in zip(
            equal, sorted((inner[each] for each in equal), key=ORDER.index), strict=True
        ):
            inner[index] = choice
    return ActivationPlan(tuple(inner), plan.hidden)


def _case(problem: Problem, best: PlanCandidate) -> Case:
    """Returns why a plan swaps as much as it does."""
    blocks = enumerate(zip(problem.workload.blocks, best.plan.inner, strict=True))
    left = {
        index: choice
        for index, (block, choice) in blocks
        if block.inner_bytes and choice != ActivationChoice.KEEP
    }
    if not left:
        return Case.FITS
    recomputed = [index for index, choice in left.items() if choice is ActivationChoice.RECOMPUTE]
    if not recomputed:
        return Case.COMPUTE
    for index, tier in product(recomputed, problem.tiers):
        block = problem.workload.blocks[index]
        seconds = block.recomputation(problem.machine)
        more = best.amounts.plus(ActivationChoice.RECOMPUTE, 0.0, -seconds).plus(tier, block.inner_bytes)
        if not problem.need(more).fits(problem.budget) and problem.seconds(more) < best.seconds:
            return Case.MEMORY
    return Case.TRANSFER if len(recomputed) == len(left) else Case.INFLECTION


def _too_small(problem: Problem) -> str:
    """Returns what the smallest plan needs, beside the budget."""
    inner = [ActivationChoice.RECOMPUTE] * len(problem.workload.blocks)
    plans = [problem.candidate(inner, hidden).amounts for hidden in (ActivationChoice.KEEP, *problem.tiers)]
    needs = [problem.need(amounts) for amounts in plans]
    device, host = min(need.device for need in needs), min(need.host for need in needs)
    budget = problem.budget
    lacks = [
        f"{name} needs at least {math.ceil(need / 2**20)} MiB, the budget is {limit / 2**20:.0f} MiB"
        for name, need, limit in (
            ("device memory", device, budget.device),
            ("host memory", host, budget.host),
        )
        if need > limit
    ]
    return (
        "; ".join(lacks or ["no plan fits both budgets"]) + "; use fewer tokens or slots, or raise the budget"
    )
