"""How much memory a plan takes of the device and of the host."""

from __future__ import annotations

from dataclasses import dataclass

from mlora.offload.options import BUFFERS, STATE_BYTES, UNIT, WAITING
from mlora.offload.planner.activation_plan import ActivationPlan, Amounts, amounts_of
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement

SWAP_BUFFERS = 1
"""Blocks of activations that are on their way, beside the block at work."""


@dataclass(frozen=True)
class PlanMemory:
    """Bytes of the device's memory and of the host's; with one memory, all of it is `device`."""

    device: float
    host: float

    def fits(self, budget: Budget) -> bool:
        """Whether it stays within a budget."""
        return self.device <= budget.device and self.host <= budget.host


def memory_need(
    machine: Machine, workload: OffloadWorkload, placement: StatePlacement, plan: ActivationPlan
) -> PlanMemory:
    """Returns the memory that a plan takes at its fullest moment.

    Args:
        machine: says whether there are one or two memories.
        workload: what is trained.
        placement: where weights and states live.
        plan: what becomes of the activations.

    Raises:
        ValueError: the plan does not fit the model, or the machine.
    """
    fixed = fixed_need(machine, workload, placement)
    return need_of_amounts(fixed, machine, workload.in_flight, amounts_of(machine, workload, plan))


@dataclass(frozen=True)
class FixedNeed:
    """Memory that is needed whatever becomes of the activations, and the activations of the largest block."""

    device: float
    host: float
    largest: float


def fixed_need(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> FixedNeed:
    """Returns what weights, states and the block at work need.

    The block at work needs as much as the largest one: for its activations, or for their gradients.
    """
    largest = max(block.inner_bytes + block.hidden_bytes for block in workload.blocks)
    parts = machine, workload, placement
    device = workload.resident_bytes + _weights_on_device(*parts) + _states_on_device(*parts) + largest
    return FixedNeed(device, _weights_on_host(*parts) + _states_on_host(*parts), largest)


def need_of_amounts(fixed: FixedNeed, machine: Machine, in_flight: int, amounts: Amounts) -> PlanMemory:
    """Returns the memory of a plan that adds up to `amounts`, of each of the micro-batches in flight."""
    buffers = SWAP_BUFFERS * fixed.largest
    device = fixed.device + in_flight * amounts.kept + (buffers if amounts.swapped else 0.0)
    host = fixed.host + in_flight * amounts.host
    if machine.one_memory:
        return PlanMemory(device + host, 0.0)
    return PlanMemory(device, host + (buffers if amounts.disk else 0.0))


def _slot_bytes(workload: OffloadWorkload, placement: StatePlacement) -> float:
    """Returns the bytes of the slots for weights."""
    count = sum(1 for block in workload.blocks if block.weight_bytes)
    return min(placement.slots, count) * max(block.weight_bytes for block in workload.blocks)


def _weights_on_device(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> float:
    if placement.streams(machine):
        return _slot_bytes(workload, placement)
    return sum(block.weight_bytes for block in workload.blocks)


def _weights_on_host(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> float:
    """Returns the weights, or with a disk the slots that they pass through."""
    if machine.one_memory or placement.base == "device":
        return 0.0
    if placement.base == "host":
        return sum(block.weight_bytes for block in workload.blocks)
    return _slot_bytes(workload, placement)


def _states_on_device(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> float:
    """Returns states and gradients, or the gradients of two blocks that are on their way to the host."""
    gradients = [block.gradient_bytes for block in workload.blocks] if workload.full else [0.0]
    if placement.optimizer == "device":
        return sum(block.state_bytes for block in workload.blocks) + sum(gradients)
    return 0.0 if machine.one_memory else 2 * max(gradients)


def _states_on_host(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> float:
    """Returns states and gradients, or the buffers of those that pass through."""
    if placement.optimizer == "device":
        return 0.0
    gradients = [block.gradient_bytes for block in workload.blocks] if workload.full else [0.0]
    if placement.optimizer == "host":
        return sum(block.state_bytes for block in workload.blocks) + sum(gradients)
    unit = min(STATE_BYTES * UNIT, max(block.state_bytes for block in workload.blocks))
    all_wait = workload.micro_batches > 1 or placement.update in ("after", "serial")
    waiting = sum(gradients) if all_wait else min(WAITING, sum(gradients))
    return BUFFERS * unit + waiting
