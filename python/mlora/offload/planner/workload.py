"""What is trained, and where its parts live while they are not used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mlora.offload.planner.machine import Machine

Place = Literal["device", "host", "disk"]
Update = Literal["active", "naive", "after", "serial"]
"""When the optimizer works: see `StatePlacement`."""

BACKWARD_OVER_FORWARD = {"lora": 1.0, "full": 2.0}
"""FLOPs of a backward pass, relative to the forward pass: a frozen base has no weight gradients."""


@dataclass(frozen=True)
class Block:
    """One decoder block; all figures are those of one micro-batch.

    A part of the model that is computed in every pass but neither streamed nor recomputed, such as the
    output head, is a block too: one without weight bytes and without inner bytes.

    Attributes:
        flops: of the forward pass.
        weight_bytes: the weights as they are streamed; 0 if they always stay on the device.
        inner_bytes: activations inside the block that backward needs. Recomputation does without them.
        hidden_bytes: the block's input, which is saved whatever becomes of the inside.
        trainable: parameters that are updated.
        state_bytes: what an update reads and writes for them: 12 a parameter with AdamW (fp32 weights and
            two moments), 14 with a 16-bit copy beside them.
        gradient_bytes: their gradients, as they leave the device.
        forward_seconds, backward_seconds: measured, in place of what `flops` gives; 0 = not measured.
        recompute_seconds: measured, what a step with recomputation takes more; 0 = as the forward pass.
    """

    flops: float = 0.0
    weight_bytes: float = 0.0
    inner_bytes: float = 0.0
    hidden_bytes: float = 0.0
    trainable: float = 0.0
    state_bytes: float = 0.0
    gradient_bytes: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    recompute_seconds: float = 0.0

    def forward(self, machine: Machine) -> float:
        """Returns the seconds of a forward pass."""
        return self.forward_seconds or self.flops / machine.flops

    def recomputation(self, machine: Machine) -> float:
        """Returns the seconds that recomputation adds to a step."""
        return self.recompute_seconds or self.forward(machine)


@dataclass(frozen=True)
class OffloadWorkload:
    """One optimizer step of a model.

    Attributes:
        blocks: in the order of a forward pass.
        tokens: of one micro-batch, all adapters together.
        micro_batches: that make up the step, one after the other.
        method: `lora`: adapters over a frozen base. `full`: all weights.
        backward_ratio: FLOPs of backward over forward; default: 1 for `lora`, 2 for `full`.
        resident_bytes: on the device at all times besides streamed weights and activations: embeddings,
            head, norms, adapters, their gradients.
        in_flight: micro-batches that hold activations at once; more than 1 only on a pipeline's stages.

    Raises:
        ValueError: there is no block, token or micro-batch, or the method is unknown.
    """

    blocks: Sequence[Block]
    tokens: int
    micro_batches: int = 1
    method: Literal["lora", "full"] = "lora"
    backward_ratio: float | None = None
    resident_bytes: float = 0.0
    in_flight: int = 1

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError("blocks: expected at least 1, got none")
        if self.method not in BACKWARD_OVER_FORWARD:
            raise ValueError(f"method: expected lora or full, got {self.method!r}")
        for name in ("tokens", "micro_batches", "in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return self.method == "full"

    def backward(self, machine: Machine, block: Block) -> float:
        """Returns the seconds of a block's backward pass, without recomputation."""
        ratio = self.backward_ratio
        if ratio is None:
            ratio = BACKWARD_OVER_FORWARD[self.method]
        return block.backward_seconds or ratio * block.forward(machine)


@dataclass(frozen=True)
class StatePlacement:
    """Where weights and optimizer states live, and when the optimizer works.

    Attributes:
        base: home of the blocks' weights. `host` and `disk` stream them through slots of the device.
        optimizer: home of the optimizer's states. `device`: the update takes no time and moves nothing.
        slots: blocks of weights that the device holds at once.
        update: `active`: under the backward pass, in the order read i, read i-1, write i (paper, Fig. 3b).
            `naive`: under the backward pass; a block's read, update and write follow one another (Fig. 3a).
            `after`: as `active`, but when the backward pass is over, as gradient clipping needs it.
            `serial`: after the backward pass, one after the other.

    Raises:
        ValueError: a place or an update is unknown, or there are fewer than 2 slots.
    """

    base: Place = "disk"
    optimizer: Place = "device"
    slots: int = 3
    update: Update = "active"

    def __post_init__(self) -> None:
        for name, known in (("base", Place), ("optimizer", Place), ("update", Update)):
            if getattr(self, name) not in get_args(known):
                expected = ", ".join(get_args(known))
                raise ValueError(f"{name}: expected one of {expected}, got {getattr(self, name)!r}")
        if self.slots < 2:
            raise ValueError(f"slots: expected at least 2, got {self.slots}")

    def streams(self, machine: Machine) -> bool:
        """Whether blocks' weights pass through slots."""
        return self.base == "disk" or (self.base == "host" and not machine.one_memory)
