"""How many tokens a pass has to carry until the streaming of its weights takes no time of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlora.offload.planner.machine import Machine
from mlora.offload.planner.traffic import streamed_blocks, streamed_bytes
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement


def tokens_to_hide(
    bytes_per_parameter: float, flops: float, bandwidth: float, *, active: float = 1.0
) -> float:
    """Returns `T* = bytes per parameter × FLOPS / (2 × bandwidth × active)` tokens of a forward pass.

    A token costs 2 FLOPs for each parameter that it uses; the weights are brought once for all tokens. So
    computation and transfer take equally long at T* tokens (paper, Eq. 2). A backward pass that does k
    times the work hides as much with T* / k tokens (Eq. 5).

    Args:
        bytes_per_parameter: 2 for bf16, 0.5 for nf4.
        flops: FLOP/s of the device.
        bandwidth: bytes per second of the slowest way that the weights take.
        active: share of the parameters that one token uses; below 1 in a mixture of experts.

    Raises:
        ValueError: a number is not above 0.

    Example:
        >>> round(tokens_to_hide(2, 165e12, 25e9))
        6600
    """
    given = {"bytes_per_parameter": bytes_per_parameter, "flops": flops, "bandwidth": bandwidth}
    for name, value in (given | {"active": active}).items():
        if not value > 0:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    return bytes_per_parameter * flops / (2 * bandwidth * active)


def adapters_to_hide(tokens: float, tokens_of_an_adapter: float) -> int:
    """Returns how many adapters together carry that many tokens."""
    return max(1, math.ceil(tokens / tokens_of_an_adapter))


@dataclass(frozen=True)
class Hidden:
    """Tokens of a micro-batch at which each pass hides the streaming of its weights.

    Attributes:
        forward, backward: of each pass, without recomputation; 0 = nothing is streamed.
    """

    forward: float
    backward: float

    @property
    def tokens(self) -> float:
        """At which both passes do."""
        return max(self.forward, self.backward)


def tokens_of_passes(machine: Machine, workload: OffloadWorkload, placement: StatePlacement) -> Hidden:
    """Returns T* of each pass for a whole model, from its blocks.

    The blocks' figures are those of `workload.tokens` tokens, and their computation grows with the tokens.
    Unlike `tokens_to_hide` it counts attention and the head, and the blocks that stay in the slots.
    """
    blocks = streamed_blocks(machine, workload, placement)
    if not blocks:
        return Hidden(0.0, 0.0)
    rates = [machine.read] if placement.base == "disk" else []
    rate = min([*rates, machine.to_device] if not machine.one_memory else rates)
    stay = placement.slots

    def tokens(size: float, seconds: float) -> float:
        return workload.tokens * size / rate / seconds if rate else math.inf

    forward = streamed_bytes(blocks[stay:])
    backward = streamed_bytes(blocks[: max(0, len(blocks) - stay)])
    return Hidden(
        tokens(forward, sum(block.forward(machine) for block in workload.blocks)),
        tokens(backward, sum(workload.backward(machine, block) for block in workload.blocks)),
    )
