"""Plans of activations that fit into memory, and how long a step takes with each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlora.offload.planner.activation_plan import (
    SWAPPED,
    ActivationChoice,
    ActivationPlan,
    Amounts,
    amounts_of,
    choices_of,
)
from mlora.offload.planner.iteration_time import time_of_amounts
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.memory_need import PlanMemory, fixed_need, need_of_amounts
from mlora.offload.planner.step_costs import step_costs
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement

NEXT_TO_NOTHING = 1e-6
"""Bytes that stand for any swap: the buffers of a tier are needed as soon as anything is swapped to it."""


@dataclass(frozen=True)
class PlanCandidate:
    """A plan, what it adds up to, and the seconds of a step; endless if it does not fit into memory."""

    plan: ActivationPlan
    amounts: Amounts
    seconds: float

    def beats(self, other: PlanCandidate) -> bool:
        """Whether it is faster, or as fast with fewer bytes on disk, fewer swapped, less recomputed."""
        if not math.isclose(self.seconds, other.seconds, rel_tol=1e-9):
            return self.seconds < other.seconds
        return self._ballast() < other._ballast()

    def _ballast(self) -> tuple[float, float, float]:
        return self.amounts.disk, self.amounts.host, self.amounts.recomputed


class Problem:
    """A machine, a workload, a placement and a budget: everything that decides how good a plan is.

    Attributes:
        choices: that the machine offers; `tiers` are those of them that swap.
        kinds: for each block, the first block that is equal to it.
        costs: of a step, whatever the plan.
    """

    def __init__(
        self, machine: Machine, workload: OffloadWorkload, placement: StatePlacement, budget: Budget
    ) -> None:
        self.machine, self.workload, self.placement, self.budget = machine, workload, placement, budget
        self.choices = choices_of(machine)
        self.tiers = [choice for choice in self.choices if choice in SWAPPED]
        first = {block: index for index, block in reversed(list(enumerate(workload.blocks)))}
        self.kinds = [first[block] for block in workload.blocks]
        self.costs = step_costs(machine, workload, placement)
        self._fixed = fixed_need(machine, workload, placement)
        self._seconds = [block.recomputation(machine) for block in workload.blocks]

    def candidate(self, inner: Sequence[ActivationChoice], hidden: ActivationChoice) -> PlanCandidate:
        """Returns a plan with its time."""
        plan = ActivationPlan(tuple(inner), hidden)
        return self._timed(plan, amounts_of(self.machine, self.workload, plan))

    def changed(self, old: PlanCandidate, changes: dict[int, ActivationChoice]) -> PlanCandidate:
        """Returns a plan that differs in some blocks."""
        inner, amounts = list(old.plan.inner), old.amounts
        for index, choice in changes.items():
            size, seconds = self.workload.blocks[index].inner_bytes, self._seconds[index]
            amounts = amounts.plus(inner[index], -size, -seconds).plus(choice, size, seconds)
            inner[index] = choice
        return self._timed(ActivationPlan(tuple(inner), old.plan.hidden), amounts)

    def seconds(self, amounts: Amounts) -> float:
        """Returns the seconds of a step, in whatever memory."""
        return time_of_amounts(self.costs, amounts).seconds

    def need(self, amounts: Amounts) -> PlanMemory:
        """Returns the memory of a plan that adds up to `amounts`."""
        return need_of_amounts(self._fixed, self.machine, self.workload.in_flight, amounts)

    def benefit(self, index: int) -> float:
        """Returns the offloading benefit of a block: seconds of recomputation by bytes (paper, Eq. 6)."""
        size = self.workload.blocks[index].inner_bytes
        return self._seconds[index] / size if size else math.inf

    def walk(
        self, hidden: ActivationChoice, tiers: Sequence[ActivationChoice], *, largest_stay: bool = False
    ) -> Iterator[PlanCandidate]:
        """Yields plans in the order of Algorithm 1: each swaps one block more.

        Blocks with the highest benefit stay on the device as long as there is room. The next ones are
        swapped: to the host as long as there is room, else to the disk. The others are recomputed. Of equal
        blocks the last ones stay, which backward needs first, and the first ones are swapped.

        Args:
            hidden: what becomes of the states between blocks, which are first in the list.
            tiers: that blocks are swapped to; memory for their buffers is set aside.
            largest_stay: keep the largest blocks first, which may fill the room better.
        """
        aside = Amounts(host=NEXT_TO_NOTHING if tiers else 0.0)
        if ActivationChoice.DISK in tiers:
            aside = Amounts(disk=NEXT_TO_NOTHING)
        amounts = aside.plus(hidden, sum(block.hidden_bytes for block in self.workload.blocks))
        inner = [ActivationChoice.RECOMPUTE] * len(self.workload.blocks)
        sizes = [block.inner_bytes for block in self.workload.blocks]
        value = sizes.__getitem__ if largest_stay else self.benefit
        for index in sorted(range(len(inner)), key=lambda each: (-value(each), -each)):
            amounts = self._taken(inner, index, [ActivationChoice.KEEP], amounts)
        yield self.candidate(inner, hidden)
        rest = [index for index, choice in enumerate(inner) if choice is ActivationChoice.RECOMPUTE]
        for index in sorted(rest, key=lambda each: (-self.benefit(each), each)) if tiers else ():
            amounts = self._taken(inner, index, tiers, amounts)
            yield self.candidate(inner, hidden)

    def _taken(
        self, inner: list[ActivationChoice], index: int, choices: Sequence[ActivationChoice], amounts: Amounts
    ) -> Amounts:
        """Gives a block the first choice that there is room for, and returns the amounts with it."""
        for choice in choices:
            more = amounts.plus(choice, self.workload.blocks[index].inner_bytes)
            if self.need(more).fits(self.budget):
                inner[index] = choice
                return more
        return amounts

    def _timed(self, plan: ActivationPlan, amounts: Amounts) -> PlanCandidate:
        fits = self.need(amounts).fits(self.budget)
        return PlanCandidate(plan, amounts, self.seconds(amounts) if fits else math.inf)
