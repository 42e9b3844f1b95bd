"""A decoder layer and a small Llama with adapters: frozen, converted by mlora_ext, and as PEFT's models.

All of them share the memory of one base. L = tokens of a sequence, N = adapters, one sequence for each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from linear.contenders import SCALING
from peft import LoraConfig, get_peft_model
from shared.shapes import ALL_LINEAR, ModelShape
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import mlora_ext as mx


def llama_config(shape: ModelShape, layers: int, length: int) -> LlamaConfig:
    """Transformers' config of a model, SDPA attention."""
    options = replace(shape, layers=layers).options
    positions = max(length, 16)
    return LlamaConfig(**options, max_position_embeddings=positions, attn_implementation="sdpa")


def decoder_layer(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A random decoder layer, frozen."""
    with device:
        layer = LlamaDecoderLayer(config, 0)
    return layer.to(dtype).requires_grad_(False)


def language_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A random Llama, frozen."""
    with device:
        model = LlamaForCausalLM(config)
    return model.to(dtype).requires_grad_(False)


def shared(base: nn.Module) -> nn.Module:
    """A copy of the modules over the same memory."""
    return copy.deepcopy(base, {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())})


def names(adapters: int) -> list[str]:
    """`a0`, `a1`, ..."""
    return [f"a{index}" for index in range(adapters)]


def lora(rank: int, p: float) -> LoraConfig:
    """LoRA on all seven linears; adapters of a bf16 or fp16 base are fp32, as is the default."""
    return LoraConfig(r=rank, lora_alpha=int(SCALING * rank), lora_dropout=p, target_modules=list(ALL_LINEAR))


def converted(base: nn.Module, ranks: Sequence[int], p: float) -> nn.Module:
    """mlora_ext's model with one adapter for each rank, as trained ones look: no B is zero."""
    configs = {name: lora(rank, p) for name, rank in zip(names(len(ranks)), ranks, strict=True)}
    model = mx.convert_model(shared(base), configs)
    with torch.no_grad():
        for name in configs:
            for key, parameter in mx.adapter_parameters(model, name).items():
                if "lora_B" in key:
                    parameter.normal_(std=0.05)
    return model.train()


def peft_models(base: nn.Module, like: nn.Module, ranks: Sequence[int], p: float) -> list[nn.Module]:
    """PEFT's models, one for each adapter of `like`, with its numbers."""
    models = []
    for name, rank in zip(names(len(ranks)), ranks, strict=True):
        model = get_peft_model(shared(base), lora(rank, p))
        mine = mx.adapter_parameters(like, name)
        with torch.no_grad():
            for key, parameter in peft_parameters(model):
                parameter.copy_(mine[key.replace(".default.", f".{name}.")])
        models.append(model.train())
    return models


def peft_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """PEFT's adapter by the names in the base model, A before B in every layer."""
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield key.removeprefix("base_model.model."), parameter


def ordered(like: nn.Module, adapters: int, peft: Sequence[nn.Module] = ()) -> list[Tensor]:
    """The adapters' Parameters, adapter after adapter, in one order for mlora_ext's and PEFT's models."""
    found: list[Tensor] = []
    for index, name in enumerate(names(adapters)):
        mine = mx.adapter_parameters(like, name)
        theirs = dict(peft_parameters(peft[index])) if peft else {}
        found += [theirs[key.replace(f".{name}.", ".default.")] if peft else mine[key] for key in mine]
    return found
