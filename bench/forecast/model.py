"""What a stage of a Llama needs, counted: seconds, bytes to the next stage, bytes of memory.

Nothing is measured here: speeds and the ratios of backward to forward are assumptions (docs/dev/scale.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from mlora.simulate.workload import SimulatedLink, StageTime
from shared.shapes import MODELS, ModelShape

SEQUENCE = 1024
"""Tokens of a sequence."""
ACHIEVED = 400e12
"""FLOP/s of a device in bf16: 40% of what an H100 SXM's data sheet says."""
RANK = 16
ITEM = 2


@dataclass(frozen=True)
class Network:
    """Between neighbouring stages.

    Attributes:
        bandwidth: bytes per second of each direction.
        latency: seconds of a message, software included.
    """

    bandwidth: float
    latency: float


NETWORKS = {
    "NVLink": Network(450e9, 10e-6),
    "InfiniBand": Network(400e9 / 8, 20e-6),
    "10 Gbit/s": Network(10e9 / 8, 100e-6),
    "1 Gbit/s": Network(1e9 / 8, 200e-6),
}
"""NVLink of an H100, InfiniBand NDR at 400 Gbit/s, Ethernet; bandwidths by name, latencies assumed."""


@dataclass(frozen=True)
class Trained:
    """A model as it is trained.

    Attributes:
        name: in `shapes.MODELS`.
        checkpointing: only the inputs of blocks are kept, and blocks are computed again in backward.
        rows: tokens of a micro-batch.
    """

    name: str
    checkpointing: bool
    rows: int = 4096

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return MODELS[self.name]

    @property
    def ratio(self) -> float:
        """Backward over forward, as measured with a frozen base."""
        return 2.0 if self.checkpointing else 1.15

    @property
    def block_parameters(self) -> int:
        """Of the linear layers of one block."""
        return sum(linear.count * linear.d_in * linear.d_out for linear in self.shape.linears)

    @property
    def block_seconds(self) -> float:
        """Forward of one block: its linear layers, and causal attention."""
        flops = 2 * self.block_parameters + 2 * self.shape.hidden * SEQUENCE
        return self.rows * flops / ACHIEVED

    @property
    def head_seconds(self) -> float:
        """Forward of the head."""
        return self.rows * 2 * self.shape.hidden * self.shape.vocabulary / ACHIEVED

    @property
    def kept_bytes(self) -> int:
        """Of one block and micro-batch, between forward and backward.

        Without checkpointing: inputs and outputs of both norms, q, k, v, the output of attention; gate, up,
        the activation and the product.
        """
        shape = self.shape
        whole = 6 * shape.hidden + 2 * shape.kv_width + 4 * shape.intermediate
        return self.rows * ITEM * (shape.hidden if self.checkpointing else whole)

    @property
    def adapter_bytes(self) -> int:
        """An adapter of all linear layers of a block: weights, gradients and two moments in fp32."""
        return 16 * sum(RANK * linear.count * (linear.d_in + linear.d_out) for linear in self.shape.linears)

    def cut(self, stages: int) -> list[int]:
        """Blocks of each stage such that the slowest is as fast as can be; the head is on the last one."""
        blocks, head = self.shape.layers, self.head_seconds / self.block_seconds

        def slowest(last: int) -> float:
            return max(-(-(blocks - last) // (stages - 1)), last + head)

        last = min(range(blocks, -1, -1), key=slowest)
        each, more = divmod(blocks - last, stages - 1)
        return [each + (index < more) for index in range(stages - 1)] + [last]

    def stages(self, stages: int) -> list[StageTime]:
        """Times of the stages."""
        forwards = [blocks * self.block_seconds for blocks in self.cut(stages)]
        forwards[-1] += self.head_seconds
        return [StageTime(forward, self.ratio * forward) for forward in forwards]

    def link(self, network: Network) -> SimulatedLink:
        """A link that carries hidden states, or their gradients."""
        return SimulatedLink(network.latency, network.bandwidth, ITEM * self.shape.hidden)

    def memory(self, stages: int, in_flight: list[int], adapters: int) -> float:
        """Bytes of the fullest stage: base, adapters, and what micro-batches in flight keep."""
        shape = self.shape
        base = [blocks * self.block_parameters * ITEM for blocks in self.cut(stages)]
        base[0] += shape.vocabulary * shape.hidden * ITEM
        base[-1] += shape.vocabulary * shape.hidden * ITEM
        return max(
            weights + blocks * (adapters * self.adapter_bytes + most * self.kept_bytes)
            for weights, blocks, most in zip(base, self.cut(stages), in_flight, strict=True)
        )


TRAINED = (Trained("llama-2-7b", checkpointing=False), Trained("llama-3-70b", checkpointing=True))
