"""What becomes of each block's activations between its forward and its backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlora.offload.planner.machine import Machine
from mlora.offload.planner.workload import OffloadWorkload


class ActivationChoice(StrEnum):
    """Keep on the device, recompute in backward, or swap to the host or to the disk."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    DISK = "disk"


SWAPPED = (ActivationChoice.HOST, ActivationChoice.DISK)


@dataclass(frozen=True)
class ActivationPlan:
    """A choice for the inside of each block, and one for what lies between all blocks.

    What lies between blocks is always saved, so a block is recomputed from its own input, whatever the
    others do.

    Attributes:
        inner: for each block, in the order of a forward pass.
        hidden: for the hidden states between blocks: keep, host or disk.

    Raises:
        ValueError: the hidden states are to be recomputed.
    """

    inner: tuple[ActivationChoice, ...]
    hidden: ActivationChoice = ActivationChoice.KEEP

    def __post_init__(self) -> None:
        if self.hidden is ActivationChoice.RECOMPUTE:
            raise ValueError("hidden: expected keep, host or disk; blocks are recomputed from these states")

    def __str__(self) -> str:
        """Returns for example ``keep 4, recompute 28; between blocks: host``."""
        counts = Counter(self.inner)
        inside = ", ".join(f"{choice} {counts[choice]}" for choice in ActivationChoice if counts[choice])
        return f"{inside}; between blocks: {self.hidden}"


@dataclass(frozen=True)
class Amounts:
    """What a plan adds up to, for one micro-batch.

    Attributes:
        kept, host, disk: bytes of activations that stay, or are swapped.
        recomputed: seconds of the device.
    """

    kept: float = 0.0
    recomputed: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    @property
    def swapped(self) -> float:
        """Bytes that are swapped."""
        return self.host + self.disk

    def plus(self, choice: ActivationChoice, size: float, seconds: float = 0.0) -> Amounts:
        """Returns the amounts with activations of `size` bytes, or `seconds` of recomputation, more."""
        if choice is ActivationChoice.KEEP:
            return Amounts(self.kept + size, self.recomputed, self.host, self.disk)
        if choice is ActivationChoice.RECOMPUTE:
            return Amounts(self.kept, self.recomputed + seconds, self.host, self.disk)
        if choice is ActivationChoice.HOST:
            return Amounts(self.kept, self.recomputed, self.host + size, self.disk)
        return Amounts(self.kept, self.recomputed, self.host, self.disk + size)


def amounts_of(machine: Machine, workload: OffloadWorkload, plan: ActivationPlan) -> Amounts:
    """Returns what a plan adds up to.

    Raises:
        ValueError: the plan has another number of blocks, or uses a memory that the machine lacks.
    """
    if len(plan.inner) != len(workload.blocks):
        raise ValueError(f"inner: expected {len(workload.blocks)} choices, got {len(plan.inner)}")
    known = choices_of(machine)
    for choice in {*plan.inner, plan.hidden} - set(known):
        raise ValueError(f"plan: this machine cannot swap to the {choice}; use {', '.join(known)}")
    found = Amounts().plus(plan.hidden, sum(block.hidden_bytes for block in workload.blocks))
    for block, choice in zip(workload.blocks, plan.inner, strict=True):
        found = found.plus(choice, block.inner_bytes, block.recomputation(machine))
    return found


def choices_of(machine: Machine) -> Sequence[ActivationChoice]:
    """Returns what a machine offers; without a second memory, to swap to the host is to keep."""
    host = () if machine.one_memory else (ActivationChoice.HOST,)
    disk = (ActivationChoice.DISK,) if machine.has_disk else ()
    return (ActivationChoice.KEEP, ActivationChoice.RECOMPUTE, *host, *disk)
