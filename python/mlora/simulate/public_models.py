"""The sizes of public models, as their `config.json` on the Hugging Face hub gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlora.offload.planner.workload import Block, OffloadWorkload

ITEM = 2
"""Bytes of an activation, of a gradient and of a weight that is not quantised: bf16."""
STATES = 12
"""Bytes of AdamW's states for each parameter: fp32 weights and two moments."""
RANK = 16
SEQUENCE = 1024


@dataclass(frozen=True)
class PublicModel:
    """Sizes of a decoder without biases, its head apart from its embeddings.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the MLP, or of one expert.
        heads, kv_heads, head_width: of the attention.
        layers: blocks.
        vocabulary: tokens that it knows.
        experts, active_experts: of a mixture: all, and those that one token passes through.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_width: int
    layers: int
    vocabulary: int
    experts: int = 1
    active_experts: int = 1

    @property
    def attention_parameters(self) -> int:
        """Of one block."""
        return 2 * self.hidden * self.head_width * (self.heads + self.kv_heads)

    def block_parameters(self, *, active: bool = False) -> int:
        """Returns the parameters of one block: all, or those that one token uses."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        count = self.active_experts if active else self.experts
        return self.attention_parameters + router + 3 * count * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.block_parameters() + 2 * self.vocabulary * self.hidden

    @property
    def inner_values(self) -> int:
        """What one block saves of a token between forward and backward.

        Inputs and outputs of both norms, q, k, v, the output of attention; of each expert its input, gate,
        up, the activation and the product.
        """
        experts = self.active_experts * (4 * self.intermediate + (self.hidden if self.experts > 1 else 0))
        return 4 * self.hidden + 2 * self.head_width * (self.heads + self.kv_heads) + experts

    @property
    def adapter_parameters(self) -> int:
        """Of one adapter of rank 16 on all linear layers of a block, without a mixture's experts."""
        width, kv_width = self.heads * self.head_width, self.kv_heads * self.head_width
        sums = 2 * (self.hidden + width) + 2 * (self.hidden + kv_width)
        return RANK * (sums + (3 * (self.hidden + self.intermediate) if self.experts == 1 else 0))

    def workload(
        self,
        tokens: int,
        *,
        method: Literal["lora", "full"] = "lora",
        bytes_per_parameter: float = ITEM,
        adapters: int = 1,
        sequence: int = SEQUENCE,
    ) -> OffloadWorkload:
        """Returns one step over one micro-batch.

        A mixture streams all its experts, since a batch of many tokens uses each of them, and computes with
        the active ones. The head is a block of its own, which stays on the device.

        Args:
            tokens: of the micro-batch.
            method: `lora` or `full`.
            bytes_per_parameter: of a block's weights as they are streamed.
            adapters: of rank 16, whose 16-bit weights and gradients stay on the device.
            sequence: tokens that attend to each other, causally.
        """
        all_of_them, full = self.block_parameters(), method == "full"
        trained = all_of_them if full else adapters * self.adapter_parameters
        attention = 2 * self.heads * self.head_width * sequence
        hidden_bytes = tokens * ITEM * self.hidden
        block = Block(
            flops=tokens * (2 * self.block_parameters(active=True) + attention),
            weight_bytes=bytes_per_parameter * all_of_them,
            inner_bytes=tokens * ITEM * self.inner_values,
            hidden_bytes=hidden_bytes,
            trainable=trained,
            state_bytes=STATES * trained,
            gradient_bytes=ITEM * trained,
        )
        head = Block(flops=tokens * 2 * self.vocabulary * self.hidden, hidden_bytes=hidden_bytes)
        resident = ITEM * 2 * self.vocabulary * self.hidden
        if not full:
            resident += 2 * ITEM * self.layers * trained
        return OffloadWorkload([block] * self.layers + [head], tokens, method=method, resident_bytes=resident)


PUBLIC_MODELS = {
    "llama-2-7b": PublicModel(4096, 11008, 32, 32, 128, 32, 32000),
    "llama-2-13b": PublicModel(5120, 13824, 40, 40, 128, 40, 32000),
    "llama-3-70b": PublicModel(8192, 28672, 64, 8, 128, 80, 128256),
    "qwen3-235b-a22b": PublicModel(4096, 1536, 64, 4, 128, 94, 151936, experts=128, active_experts=8),
}
"""By the name that `mlora simulate offload --model` takes."""
