"""Random Llamas in the sizes of `shapes.py`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shared.shapes import ModelShape


def random_llama(shape: ModelShape, **options: Any) -> LlamaForCausalLM:
    """Returns a random model, the same for the same sizes; `options` are those of Transformers' config."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape.options, **options))
