"""The time of an optimizer step: `T_iter = T_f + T_b` (paper, section IV-D, Eq. 1 to 5), with corrections.

What differs from the paper is in `docs/decisions/39-offload-planner.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlora.offload.planner.activation_plan import ActivationPlan, Amounts, amounts_of
from mlora.offload.planner.machine import Machine
from mlora.offload.planner.optimizer_time import backward_and_update
from mlora.offload.planner.pass_time import Bound, PassTime, pass_time
from mlora.offload.planner.step_costs import StepCosts, step_costs
from mlora.offload.planner.traffic import swap_in, swap_out
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement


@dataclass(frozen=True)
class IterationTime:
    """The predicted time of an optimizer step.

    Attributes:
        forward, backward: passes of all micro-batches. The backward pass does the optimizer's work beside
            its own if the update is `active` or `naive`.
        optimizer: what the update adds when the backward pass is over.
        tokens: of all micro-batches.
    """

    forward: PassTime
    backward: PassTime
    optimizer: PassTime
    tokens: int

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward.seconds + self.backward.seconds + self.optimizer.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the step, all adapters together, by its seconds."""
        return self.tokens / self.seconds

    @property
    def bound(self) -> Bound:
        """What bounds the longest of the three parts."""
        return max((self.forward, self.backward, self.optimizer), key=lambda part: part.seconds).bound

    @property
    def compute_seconds(self) -> float:
        """What the device computes; the rest of the step it waits."""
        return self.forward.work.compute + self.backward.work.compute

    @property
    def moved_bytes(self) -> dict[str, float]:
        """Bytes read, written, to the device and to the host."""
        work = self.forward.work + self.backward.work + self.optimizer.work
        return {
            "read": work.read,
            "written": work.written,
            "to_device": work.to_device,
            "to_host": work.to_host,
        }


def iteration_time(
    machine: Machine, workload: OffloadWorkload, placement: StatePlacement, plan: ActivationPlan
) -> IterationTime:
    """Predicts an optimizer step.

    ``T_iter = N (T_f + T_b) + T_o``, for N micro-batches. `T_f` and `T_b` are each the largest of the
    device's computation, both directions between host and device, the disk and the processor. `T_o` is what
    the optimizer adds at the end.

    Args:
        machine: its rates.
        workload: what is trained.
        placement: where weights and states live.
        plan: what becomes of the activations.

    Raises:
        ValueError: the plan does not fit the model, or the machine.
    """
    return time_of_amounts(step_costs(machine, workload, placement), amounts_of(machine, workload, plan))


def time_of_amounts(costs: StepCosts, amounts: Amounts) -> IterationTime:
    """Predicts an optimizer step from what a plan adds up to."""
    machine, count = costs.machine, costs.workload.micro_batches
    work = costs.forward + swap_out(machine, amounts)
    forward = pass_time(machine, work, waits_for_slots(costs, work.compute))
    work = costs.backward + swap_in(machine, amounts)
    waits = waits_for_slots(costs, work.compute)
    last, update = backward_and_update(costs, work, waits)
    backward = pass_time(machine, work, waits).times(count - 1) + last if count > 1 else last
    return IterationTime(forward.times(count), backward, update, count * costs.workload.tokens)


def waits_for_slots(costs: StepCosts, compute: float) -> dict[str, float]:
    """Returns how long the reads of weights have to wait in a pass of `compute` seconds.

    When a pass begins, its first blocks hold all slots. The first read begins when the first block is done.
    The last read has ended before the last block is computed.
    """
    if not costs.streamed:
        return {}
    wait = 2 * compute / len(costs.workload.blocks)
    from_disk = {"disk": wait, "read": wait} if costs.placement.base == "disk" else {}
    return {"to device": wait, **from_disk}
