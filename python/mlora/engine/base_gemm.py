"""Who multiplies by the frozen weights of one stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mlora_ext.backends.gpu_base_gemm import Record, serves, shapes_of
from mlora_ext.backends.selection import backend_for, gpu_operator, use_gpu_base_gemm
from mlora_ext.frozen.base_gemm import set_base_gemm
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.layers.linear import MultiLoRALinear


def set_base_gemm_on(device: torch.device, dtype: str, library: str | None) -> None:
    """Sets the library of a device; None: the default of a GPU. ValueError if it is not there."""
    if device.type != "cuda":
        if library is None:
            raise ValueError(f"base_gemm: expected a library of {device}, got None")
        set_base_gemm({dtype: library})
    elif library is not None or backend_for(device, torch.float32) == "cuda":
        use_gpu_base_gemm(library)  # type: ignore[arg-type]


def base_gemm_times(model: nn.Module, device: torch.device, known: Sequence[Record]) -> list[Record]:
    """Takes over what is known of products on a GPU, measures and returns those of a model's linear layers.

    Nothing where there is no choice.
    """
    weights = [
        module.weight
        for module in model.modules()
        if (isinstance(module, MultiLoRALinear) and isinstance(module.frozen, PlainWeight))
        or type(module) is nn.Linear
    ]
    shapes = shapes_of(weight for weight in weights if not weight.is_meta)
    if not shapes or device.type != "cuda":
        return []
    if backend_for(device, torch.bfloat16) != "cuda" or not serves(device):
        return []
    choice = gpu_operator("cuda").base_gemm  # type: ignore[attr-defined]
    choice.learn(known)
    choice.measure(shapes, device)
    return choice.known({*shapes})  # type: ignore[no-any-return]
