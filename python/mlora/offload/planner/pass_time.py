"""The time of one pass: the largest of what each resource needs (paper, Eq. 2 and 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mlora.offload.planner.machine import Machine
from mlora.offload.planner.traffic import Work

Bound = Literal["compute", "read", "write", "to host", "to device", "processor"]
"""The resource that a pass waits for. With a shared disk: whichever of read and write moves more."""


@dataclass(frozen=True)
class PassTime:
    """How long a pass takes, what bounds it, and what it does."""

    seconds: float
    bound: Bound
    work: Work

    def __add__(self, other: PassTime) -> PassTime:
        longer = self if self.seconds >= other.seconds else other
        return PassTime(self.seconds + other.seconds, longer.bound, self.work + other.work)

    def times(self, count: int) -> PassTime:
        """Returns the time of `count` passes, one after the other."""
        return PassTime(count * self.seconds, self.bound, self.work.times(count))


def busy_seconds(machine: Machine, work: Work) -> dict[str, float]:
    """Returns the seconds that each resource is busy with some work.

    The processor's cores share its part: the device's computation, if it runs on them, and what reads,
    writes and updates cost.
    """
    read, write = _seconds(work.read, machine.read), _seconds(work.written, machine.write)
    processor = (
        work.compute * machine.compute_cores
        + work.read * machine.read_seconds
        + work.written * machine.write_seconds
        + work.updated * machine.update_seconds
    )
    disk = {"disk": read + write} if machine.shared_disk else {"read": read, "write": write}
    return {
        "compute": work.compute,
        **disk,
        "to host": work.to_host / machine.to_host,
        "to device": work.to_device / machine.to_device,
        "processor": processor / machine.cores,
    }


def pass_time(machine: Machine, work: Work, idle: Mapping[str, float]) -> PassTime:
    """Returns the time of a pass.

    Args:
        machine: does the work.
        work: of the pass.
        idle: for a resource, the seconds of the pass in which it has to wait; none where it is not named.
    """
    ends = {name: busy and busy + idle.get(name, 0.0) for name, busy in busy_seconds(machine, work).items()}
    name = max(ends, key=lambda each: ends[each])
    return PassTime(ends[name], bound_name(name, work), work)


def bound_name(resource: str, work: Work) -> Bound:
    """Returns the bound's name for a resource: a shared disk is bound by its reads or by its writes."""
    if resource == "disk":
        return "read" if work.read >= work.written else "write"
    return resource  # type: ignore[return-value]


def _seconds(size: float, rate: float) -> float:
    """Returns the seconds of a transfer; without a disk, endless."""
    return size / rate if rate else size and float("inf")
