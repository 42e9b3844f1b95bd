"""An oracle for the planner: the time of every plan at once, written down apart from the planner's code."""

import numpy as np
from mlora.offload.planner.activation_plan import ActivationChoice
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement

SHAPES: dict[tuple[int, int], np.ndarray] = {}


def assignments(choices: int, blocks: int) -> np.ndarray:
    """Every choice of every block, `[choices ** blocks, blocks]`."""
    if (choices, blocks) not in SHAPES:
        columns = np.indices((choices,) * blocks, dtype=np.int8).reshape(blocks, -1)
        SHAPES[choices, blocks] = np.ascontiguousarray(columns.T)
    return SHAPES[choices, blocks]


def shortest(machine: Machine, work: OffloadWorkload, place: StatePlacement, budget: Budget) -> float:
    """Seconds of the fastest plan that fits; lorA with states on the device, or full and active on a disk."""
    tiers = [
        choice
        for choice in (ActivationChoice.HOST, ActivationChoice.DISK)
        if choice is ActivationChoice.DISK or not machine.one_memory
    ]
    choices = [ActivationChoice.KEEP, ActivationChoice.RECOMPUTE, *tiers]
    table = assignments(len(choices), len(work.blocks))
    inner = np.array([block.inner_bytes for block in work.blocks])
    forward = np.array([block.flops for block in work.blocks]) / machine.flops
    sums = {choice: (table == number) @ inner for number, choice in enumerate(choices)}
    again = (table == 1) @ forward
    lies = sum(block.hidden_bytes for block in work.blocks)
    best = np.inf
    for hidden in (ActivationChoice.KEEP, *tiers):
        kept, host, disk = (
            sums.get(c, 0.0) + (lies if hidden is c else 0.0)
            for c in (ActivationChoice.KEEP, ActivationChoice.HOST, ActivationChoice.DISK)
        )
        fits = memory(machine, work, place, kept, host, disk, budget)
        if np.any(fits):
            best = min(best, np.min(seconds(machine, work, place, again, host, disk)[fits]))
    return float(best)


def seconds(machine, work, place, again, host, disk):
    """T_f + T_b + T_o of one micro-batch, for arrays of recomputed seconds and swapped bytes."""
    weights = [block.weight_bytes for block in work.blocks]
    count, swapped = len(weights), host + disk
    compute = sum(block.flops for block in work.blocks) / machine.flops
    ratio = 2 if work.full else 1
    read_f = sum(weights[place.slots :])
    read_b = sum(weights[: max(0, count - place.slots)])
    link = 0 if machine.one_memory else 1
    out = compute + (swapped * machine.copy_seconds if machine.one_memory else 0)
    ahead = 2 * out / count
    t_f = largest(machine, out, read_f, disk, link * read_f, link * swapped, waits=(0, ahead, 0, ahead, 0))
    back = ratio * compute + again
    if not work.full:
        behind = 2 * back / count
        return t_f + largest(
            machine,
            back,
            read_b + disk,
            0,
            link * (read_b + swapped),
            0,
            waits=(0, behind, 0, behind, 0),
        )
    states = sum(block.state_bytes for block in work.blocks)
    gradients = link * sum(block.gradient_bytes for block in work.blocks)
    written = states + sum(weights)
    parameters = sum(block.trainable for block in work.blocks)
    r, w = states / count / machine.read, written / count / machine.write
    u = parameters * machine.update_seconds / machine.cores / count
    first = np.maximum(back / count, r)
    fill = np.maximum(0, first + u - 2 * r) + max(0, u - w)
    waits = (
        gradients / count / machine.to_host + u + w,
        fill,
        (1 - machine.compute_cores / machine.cores) * first + w,
        2 * back / count,
        u + w,
    )
    return t_f + largest(
        machine,
        back,
        read_b + disk + states,
        written,
        link * (read_b + swapped),
        gradients,
        parameters,
        waits,
    )


def largest(machine, compute, read, written, to_device, to_host, updated=0, waits=(0, 0, 0, 0, 0)):
    """Eq. 2 and 5 for a shared disk; waits of device, disk, processor, to device, to host."""
    processor = (
        compute * machine.compute_cores
        + read * machine.read_seconds
        + written * machine.write_seconds
        + updated * machine.update_seconds
    ) / machine.cores
    disk = read / machine.read + written / machine.write
    lanes = (compute, disk, processor, to_device / machine.to_device, to_host / machine.to_host)
    ends = [np.where(np.asarray(busy) > 0, busy + wait, 0) for busy, wait in zip(lanes, waits, strict=True)]
    return np.max(np.stack(np.broadcast_arrays(*ends)), axis=0)


def memory(machine, work, place, kept, host, disk, budget):
    """Which plans stay within the budget."""
    one = max(block.inner_bytes + block.hidden_bytes for block in work.blocks)
    slots = min(place.slots, len(work.blocks)) * max(block.weight_bytes for block in work.blocks)
    states = min(24 << 20, max(block.state_bytes for block in work.blocks))
    gradients = max(block.gradient_bytes for block in work.blocks) if work.full else 0
    device = work.resident_bytes + slots + kept + one + np.where(host + disk > 0, one, 0)
    waiting = min(256 << 20, sum(block.gradient_bytes for block in work.blocks))
    passing = 3 * states + waiting if work.full else 0
    if machine.one_memory:
        return device + passing <= budget.device
    device = device + 2 * gradients
    return (device <= budget.device) & (slots + passing + host + np.where(disk > 0, one, 0) <= budget.host)
