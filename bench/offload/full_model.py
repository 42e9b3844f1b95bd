"""A random Llama in memory, all weights of which are trained in a plain loop."""

from __future__ import annotations

import time
from typing import Any

import torch
from mlora.offload.offloaded_model import offloaded
from shared.shapes import ModelShape
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from offload.base import DTYPE

SHAPE = ModelShape(1024, 2816, heads=8, kv_heads=8, layers=16, vocabulary=4096)
"""206 million parameters in its blocks."""
QUICK_SHAPE = ModelShape(256, 704, heads=4, kv_heads=4, layers=4, vocabulary=512)
SEQUENCE = 256
"""Tokens of a sequence; a batch has several, so that its compute grows with its tokens."""


def random_llama(shape: ModelShape, seed: int = 0) -> LlamaForCausalLM:
    """Returns a bf16 Llama in memory, the same for the same shape and seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(**shape.options, max_position_embeddings=4096, use_cache=False)
    return LlamaForCausalLM(config).to(DTYPE).train()


def parameters_in_blocks(shape: ModelShape) -> int:
    """Returns how many parameters the matrices in the blocks have."""
    return shape.layers * sum(linear.count * linear.d_in * linear.d_out for linear in shape.linears)


def random_tokens(tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Returns `[sequences, 256]` token ids; fewer than 256 tokens make one shorter sequence."""
    length = min(SEQUENCE, tokens)
    return torch.randint(
        vocabulary, (tokens // length, length), generator=torch.Generator().manual_seed(seed)
    )


class Tuned:
    """A model that trains the same tokens at each step, its weights in memory.

    Args:
        shape: of the model.
        optimizer: whether it has one; without it, gradients are dropped after each backward pass.
        options: of `offloaded`.

    Attributes:
        losses: of all steps.
        forward, backward: seconds of the last step's passes.
    """

    def __init__(self, shape: ModelShape, *, optimizer: bool = True, **options: Any) -> None:
        self.losses: list[float] = []
        self.forward = self.backward = 0.0
        self.model = random_llama(shape)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4) if optimizer else None
        self.offloaded = offloaded(self.model, self._optimizer, base="device", **options)
        self.offloaded.__enter__()

    def step(self, ids: Tensor) -> None:
        """Trains once."""
        begin = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids).loss
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        self.forward, self.backward = middle - begin, end - middle
        if self._optimizer is None:
            self.model.zero_grad()
        else:
            self._optimizer.step()
        self.losses.append(loss.item())

    def update(self) -> None:
        """Updates all weights with gradients of ones, as after a backward pass that took no time."""
        optimizer = self.offloaded.optimizer
        assert optimizer is not None
        for name, parameter in reversed(optimizer._parameters.items()):
            parameter.grad = self._ones(parameter)
            optimizer._submit(name)
        optimizer.step()

    def _ones(self, parameter: Tensor) -> Tensor:
        """Returns a gradient; all of them share memory, so that it takes no time to fill it."""
        if not hasattr(self, "_memory"):
            most = max(each.numel() for each in self.model.parameters())
            self._memory = torch.full((most,), 1e-3, dtype=DTYPE)
        return self._memory[: parameter.numel()].view(parameter.shape)

    def close(self) -> None:
        """Ends the offloading."""
        self.offloaded.__exit__()
