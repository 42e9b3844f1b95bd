"""The linear layers of the models that the benchmarks are about.

Letters: D = d_in, O = d_out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Linear:
    """Linear layers of one shape in a decoder layer.

    Attributes:
        names: of the layers, as Transformers calls them.
        d_in, d_out: D and O.
    """

    names: tuple[str, ...]
    d_in: int
    d_out: int

    @property
    def count(self) -> int:
        """How many of this shape a decoder layer has."""
        return len(self.names)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama model.

    Attributes:
        hidden, intermediate: widths of the residual stream and of the MLP.
        heads, kv_heads: attention heads, and those of keys and values.
        layers, vocabulary: decoder layers, tokens.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int

    @property
    def kv_width(self) -> int:
        """Width of keys and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def options(self) -> dict[str, int]:
        """The sizes, by the names of Transformers' configs."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
        }

    @property
    def linears(self) -> list[Linear]:
        """The seven linear layers of a decoder layer, those of equal shape together."""
        shapes = dict.fromkeys(self.seven.values())
        return [Linear(tuple(name for name, at in self.seven.items() if at == s), *s) for s in shapes]

    @property
    def seven(self) -> dict[str, tuple[int, int]]:
        """D and O of each linear layer of a decoder layer."""
        return {
            "q_proj": (self.hidden, self.hidden),
            "k_proj": (self.hidden, self.kv_width),
            "v_proj": (self.hidden, self.kv_width),
            "o_proj": (self.hidden, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }


MODELS = {
    "llama-2-7b": ModelShape(4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": ModelShape(5120, 13824, 40, 40, 40, 32000),
    "llama-3-8b": ModelShape(4096, 14336, 32, 8, 32, 128256),
    "llama-3-70b": ModelShape(8192, 28672, 64, 8, 80, 128256),
    "tinyllama": ModelShape(2048, 5632, 32, 4, 22, 32000),
    "quick": ModelShape(64, 96, 4, 2, 2, 128),
}
"""By the name that `--models` takes; `quick` is no real model."""
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHARE_X = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The linear layers of a decoder layer, those with the same input together."""


def random_llama(shape: ModelShape, **options: Any) -> LlamaForCausalLM:
    """Returns a random model, the same for the same sizes; `options` are those of Transformers' config."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape.options, **options))
