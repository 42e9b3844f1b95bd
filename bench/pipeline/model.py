"""What is trained: a Llama of random weights with plain LoRA on its linear layers.

Ours and the peers run the same modules: Transformers' decoder layers, `LoRALinear` below and AdamW. Every
process makes the whole model from one seed and keeps its part.

T rows of a micro-batch, D = d_in, O = d_out, R = rank, V tokens of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from shared.shapes import ALL_LINEAR
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Shape:
    """The model, and one micro-batch of an adapter.

    Attributes:
        hidden, intermediate, layers, heads, key_heads, vocabulary: of the Llama.
        rank: of every adapter.
        sequences, length: of a micro-batch.
        targets: names of the layers with adapters.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    rank: int
    sequences: int
    length: int
    targets: Sequence[str] = ALL_LINEAR

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length

    @property
    def message_bytes(self) -> int:
        """Activations of a micro-batch between two stages."""
        return self.rows * self.hidden * 4


class Choice:
    """Whose micro-batch goes forward; every layer of a process asks it.

    Attributes:
        adapter: its index.
    """

    adapter = 0


class LoRALinear(nn.Module):
    """`y = x·Wᵀ + (x·Aᵀ)·Bᵀ` with the A and B of the chosen adapter; alpha = r."""

    def __init__(self, base: nn.Linear, rank: int, adapters: int, choice: Choice) -> None:
        super().__init__()
        self.base, self._choice = base, choice
        wide, high = base.in_features, base.out_features
        self.lora_A = nn.ModuleList(nn.Linear(wide, rank, bias=False) for _ in range(adapters))
        self.lora_B = nn.ModuleList(nn.Linear(rank, high, bias=False) for _ in range(adapters))

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to `[..., O]`."""
        if not self.lora_A:
            return self.base(x)  # type: ignore[no-any-return]
        chosen = self._choice.adapter
        return self.base(x) + self.lora_B[chosen](self.lora_A[chosen](x))


class Model(nn.Module):
    """Consecutive decoder layers, with the embedding before the first and the head behind the last."""

    def __init__(self, shape: Shape, adapters: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.key_heads,
            vocab_size=shape.vocabulary,
            attn_implementation="sdpa",
        )
        self.choice, self.vocabulary = Choice(), shape.vocabulary
        self.embedding: nn.Module | None = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(shape.layers))
        self.norm = LlamaRMSNorm(shape.hidden)
        self.head: nn.Module | None = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.requires_grad_(False)
        for layer in self.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        on_it = adapters if name in shape.targets else 0
                        setattr(part, name, LoRALinear(linear, shape.rank, on_it, self.choice))
        places = torch.arange(shape.length).unsqueeze(0)
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), places)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def cut(self, stage: int, stages: int) -> Model:
        """The part of a stage, as a copy; stages have equally many decoder layers."""
        each = len(self.layers) // stages
        part = copy.copy(self)
        part._modules = dict(self._modules)
        part.layers = self.layers[stage * each : (stage + 1) * each]
        if stage:
            part.embedding = None
        if stage < stages - 1:
            part.head = None
        return copy.deepcopy(part)

    def forward(self, given: Tensor, *, adapter: Tensor | int | None = None, **_: Any) -> Tensor:
        """Ids `[sequences, length]` or hidden states to hidden states or logits."""
        if adapter is not None:
            self.choice.adapter = int(adapter if isinstance(adapter, int) else adapter[0])
        hidden = given if self.embedding is None else self.embedding(given)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=(self.cos, self.sin))
        return hidden if self.head is None else self.head(self.norm(hidden))


def token_ids(shape: Shape, adapter: int, step: int, micro_batch: int) -> Tensor:
    """The ids of a micro-batch `[sequences, length]`, which are its targets, too."""
    generator = torch.Generator().manual_seed(10**6 * adapter + 10**3 * step + micro_batch)
    return torch.randint(shape.vocabulary, (shape.sequences, shape.length), generator=generator)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Trained:
    """The adapters of a module: their parameters, AdamW for each, and what they began with."""

    def __init__(self, module: nn.Module, adapters: int) -> None:
        found = dict(module.named_parameters())
        self.parameters = [
            [p for name, p in found.items() if f"lora_A.{k}." in name or f"lora_B.{k}." in name]
            for k in range(adapters)
        ]
        self._initial = [[p.detach().clone() for p in own] for own in self.parameters]
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        with torch.no_grad():
            for own, initial in zip(self.parameters, self._initial, strict=True):
                for parameter, value in zip(own, initial, strict=True):
                    parameter.copy_(value)
        self._optimizers = [
            torch.optim.AdamW(own, lr=LEARNING_RATE, weight_decay=0.0, fused=True) for own in self.parameters
        ]

    def step(self, adapter: int) -> None:
        """Update one adapter by its gradients, and drop these."""
        self._optimizers[adapter].step()
        self._optimizers[adapter].zero_grad()
