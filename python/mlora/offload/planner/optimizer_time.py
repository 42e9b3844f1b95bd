"""What the optimizer adds to a backward pass (paper, section IV-C, Fig. 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlora.offload.planner.machine import Machine
from mlora.offload.planner.pass_time import Bound, PassTime, pass_time
from mlora.offload.planner.step_costs import StepCosts
from mlora.offload.planner.traffic import Work


@dataclass(frozen=True)
class _Group:
    """Mean seconds of one block's backward pass and gradients, and of its states' read, update and write."""

    backward: float
    gradients: float
    read: float
    update: float
    write: float

    @property
    def handled(self) -> float:
        """Seconds of read, update and write, one after the other."""
        return self.read + self.update + self.write


def backward_and_update(
    costs: StepCosts, work: Work, waits: Mapping[str, float]
) -> tuple[PassTime, PassTime]:
    """Returns the times of the last backward pass of a step, and of what the optimizer adds to it.

    Args:
        costs: of the step.
        work: of the backward pass alone.
        waits: of its resources, for slots.
    """
    machine, update, count, when = costs.machine, costs.update, costs.trained, costs.placement.update
    plain = pass_time(machine, work, waits)
    if not update.updated:
        return plain, PassTime(0.0, plain.bound, update)
    if when in ("after", "serial"):
        group = _group(machine, update, Work(), count)
        if when == "serial":
            return plain, PassTime(count * group.handled, _longest(group, update), update)
        return plain, pass_time(machine, update, _waits_alone(group))
    group, both = _group(machine, update, work, count), work + update
    backward = pass_time(machine, both, waits if not update.read else {})
    whole = pass_time(machine, both, _waits_for_gradients(machine, update, group, waits))
    if when == "naive":
        handlers = PassTime(group.backward + count * group.handled, _longest(group, update), both)
        whole = max(whole, handlers, key=lambda each: each.seconds)
    return backward, PassTime(max(0.0, whole.seconds - backward.seconds), whole.bound, Work())


def _group(machine: Machine, update: Work, backward: Work, count: int) -> _Group:
    """Returns the mean seconds of `count` blocks."""
    return _Group(
        backward.compute / count,
        (backward.to_host + update.to_host) / machine.to_host / count,
        update.read / count / machine.read if update.read else 0.0,
        update.updated * machine.update_seconds / machine.cores / count,
        update.written / count / machine.write if update.written else 0.0,
    )


def _waits_for_gradients(
    machine: Machine, update: Work, group: _Group, waits: Mapping[str, float]
) -> dict[str, float]:
    """Returns how long each resource waits in an active update: its pipeline fills and drains by one block.

    The first update needs a gradient and its states; two blocks' states are read meanwhile. The last update
    and the last write follow the last gradient.
    """
    first, tail = max(group.backward, group.read), group.update + group.write
    beside = 1 - machine.compute_cores / machine.cores  # cores that wait for the device
    found = {
        **waits,
        "compute": group.gradients + tail,
        "to host": tail,
        "processor": beside * first + group.write,
    }
    if not update.read:
        return found | {name: waits.get(name, 0.0) + group.update for name in ("disk", "read", "write")}
    fill, drain = max(0.0, first + group.update - 2 * group.read), max(0.0, group.update - group.write)
    return found | {"disk": fill + drain, "read": tail, "write": first + group.update}


def _waits_alone(group: _Group) -> dict[str, float]:
    """Returns how long each resource waits in an update that follows the backward pass."""
    return {
        "disk": max(0.0, group.update - group.read) + max(0.0, group.update - group.write),
        "read": group.update + group.write,
        "write": group.read + group.update,
        "processor": group.read + group.write,
    }


def _longest(group: _Group, update: Work) -> Bound:
    """Returns what a handler that reads, updates and writes is bound by."""
    if group.update >= max(group.read, group.write):
        return "processor"
    return "read" if update.read >= update.written else "write"
