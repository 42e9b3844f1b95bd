"""What a pass has to do: seconds of the device, bytes over each way, parameters that are updated."""

from __future__ import annotations

from dataclasses import dataclass

from mlora.offload.planner.activation_plan import Amounts
from mlora.offload.planner.machine import Machine
from mlora.offload.planner.workload import Block, OffloadWorkload, StatePlacement


@dataclass(frozen=True)
class Work:
    """The work of a pass.

    Attributes:
        compute: seconds of the device.
        read, written: bytes from and to the disk.
        to_device, to_host: bytes between host and device; nothing with one memory.
        updated: parameters of which the processor makes the optimizer's update.
    """

    compute: float = 0.0
    read: float = 0.0
    written: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0
    updated: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.compute + other.compute,
            self.read + other.read,
            self.written + other.written,
            self.to_device + other.to_device,
            self.to_host + other.to_host,
            self.updated + other.updated,
        )

    def times(self, count: int) -> Work:
        """Returns the work of `count` passes."""
        return Work(*(count * getattr(self, name) for name in self.__dataclass_fields__))


def forward_work(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> Work:
    """Returns the work of one micro-batch's forward pass, without swaps.

    Blocks that stayed in the slots at the end of the backward pass, the first ones, are not read: an update
    changes a weight in its slot, too.
    """
    weights = streamed_bytes(streamed_blocks(machine, workload, placement)[placement.slots :])
    return Work(
        compute=sum(block.forward(machine) for block in workload.blocks),
        read=weights if placement.base == "disk" else 0.0,
        to_device=0.0 if machine.one_memory else weights,
    )


def backward_work(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> Work:
    """Returns the work of one micro-batch's backward pass, without swaps, recomputation and optimizer.

    The last blocks of the forward pass stayed, so they are not read. A block is recomputed while its weights
    are there.
    """
    blocks = streamed_blocks(machine, workload, placement)
    weights = streamed_bytes(blocks[: max(0, len(blocks) - placement.slots)])
    gradients = 0.0
    if workload.full and placement.optimizer != "device" and not machine.one_memory:
        gradients = sum(block.gradient_bytes for block in workload.blocks)
    return Work(
        compute=sum(workload.backward(machine, block) for block in workload.blocks),
        read=weights if placement.base == "disk" else 0.0,
        to_device=0.0 if machine.one_memory else weights,
        to_host=gradients,
    )


def swap_out(machine: Machine, amounts: Amounts) -> Work:
    """Returns what a plan of activations adds to a forward pass.

    Without a GPU, what computes copies the bytes that are swapped, so that their memory may be used again.
    """
    if machine.one_memory:
        return Work(amounts.swapped * machine.copy_seconds, written=amounts.disk)
    return Work(written=amounts.disk, to_host=amounts.swapped)


def swap_in(machine: Machine, amounts: Amounts) -> Work:
    """Returns what a plan of activations adds to a backward pass."""
    to_device = 0.0 if machine.one_memory else amounts.swapped
    return Work(amounts.recomputed, amounts.disk, to_device=to_device)


def update_work(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> Work:
    """Returns the work of the optimizer in one step, by the processor.

    It reads and writes the states. In full tuning it writes the weights' 16-bit copies too, to their home. An
    adapter's gradients leave the device once a step, and its new weights come back.
    """
    if placement.optimizer == "device" and not machine.one_memory:
        return Work()
    states = sum(block.state_bytes for block in workload.blocks) if placement.optimizer == "disk" else 0.0
    copies = sum(block.weight_bytes for block in workload.blocks)
    gradients = 0.0 if machine.one_memory else sum(block.gradient_bytes for block in workload.blocks)
    stays = not workload.full or placement.base == "device"
    return Work(
        read=states,
        written=states + (copies if workload.full and placement.base == "disk" else 0.0),
        to_device=gradients if stays else 0.0,
        to_host=0.0 if workload.full else gradients,
        updated=sum(block.trainable for block in workload.blocks),
    )


def streamed_blocks(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> list[Block]:
    """Returns the blocks of which the weights pass through slots, in the order of a forward pass."""
    return [block for block in workload.blocks if block.weight_bytes and placement.streams(machine)]


def streamed_bytes(blocks: list[Block]) -> float:
    """Returns the bytes of blocks' weights."""
    return sum(block.weight_bytes for block in blocks)
