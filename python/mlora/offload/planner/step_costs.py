"""What a step costs whatever becomes of the activations: everything that a search needs only once."""

from __future__ import annotations

from dataclasses import dataclass

from mlora.offload.planner.machine import Machine
from mlora.offload.planner.traffic import Work, backward_work, forward_work, streamed_blocks, update_work
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement


@dataclass(frozen=True)
class StepCosts:
    """The work of a step's passes without swaps and recomputation.

    Attributes:
        machine, workload, placement: that it is of.
        forward, backward: of one micro-batch.
        update: of the optimizer, once a step.
        streamed: blocks of which the weights pass through slots.
        trained: blocks with trainable parameters.
    """

    machine: Machine
    workload: OffloadWorkload
    placement: StatePlacement
    forward: Work
    backward: Work
    update: Work
    streamed: int
    trained: int


def step_costs(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> StepCosts:
    """Returns what a step costs whatever becomes of the activations."""
    parts = machine, workload, placement
    return StepCosts(
        *parts,
        forward=forward_work(*parts),
        backward=backward_work(*parts),
        update=update_work(*parts),
        streamed=len(streamed_blocks(*parts)),
        trained=sum(1 for block in workload.blocks if block.trainable),
    )
