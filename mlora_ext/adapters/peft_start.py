"""Initial values that PEFT computes itself, on a copy of one layer's weight.

Letters: D = d_in, O = d_out, R = rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .kind import LayerSpec
from .lora_config import init_kind

if TYPE_CHECKING:
    from peft import LoraConfig

Prepare = Callable[[nn.Module], None]
"""Puts on a layer what PEFT's own preprocessing would, such as a gradient."""


def start_values(
    weight: Tensor,
    config: LoraConfig,
    spec: LayerSpec,
    seed: int,
    prepare: Prepare | None = None,
    *,
    as_conv1d: bool = False,
) -> dict[str, Tensor]:
    """Returns `lora_A [R, D]` and `lora_B [O, R]` as PEFT initialises an adapter on a layer with this weight.

    PEFT puts the adapter on a layer of its own with a copy of the weight, in fp32, on the weight's device.
    Where the layer is too narrow for the rank, PEFT gives fewer columns; the others are zeros here.

    Args:
        weight: `[O, D]`.
        config: the adapter's; its `init_lora_weights` says how.
        spec: the adapter's settings in the layer.
        seed: of what PEFT draws.
        prepare: called with the layer before PEFT sees it.
        as_conv1d: whether PEFT sees GPT-2's `Conv1D`.
    """
    from peft import inject_adapter_in_model

    model = nn.Module()
    model.layer = _layer(weight, as_conv1d)
    if prepare is not None:
        prepare(model.layer)
    devices = [weight.device] if weight.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad(), weight.device:
        torch.manual_seed(seed)
        layer: Any = inject_adapter_in_model(_alone(config, spec, as_conv1d), model).layer
    a, b = layer.lora_A.default.weight.detach(), layer.lora_B.default.weight.detach()
    missing = spec.rank - a.shape[0]
    if missing:
        a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
    return {"lora_A": a, "lora_B": b}


def _layer(weight: Tensor, as_conv1d: bool) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    d_out, d_in = weight.shape
    with torch.device("meta"):
        layer: Any = Conv1D(d_out, d_in) if as_conv1d else nn.Linear(d_in, d_out, bias=False)
    values = weight.detach().float()
    layer.weight = nn.Parameter((values.t() if as_conv1d else values).clone(), requires_grad=False)
    return layer  # type: ignore[no-any-return]


def _alone(config: LoraConfig, spec: LayerSpec, as_conv1d: bool) -> LoraConfig:
    """Returns a config of the same initialisation that targets the one layer."""
    from peft import LoraConfig

    own = ("corda_config", "lora_ga_config")
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.scaling * spec.rank,  # type: ignore[arg-type]
        target_modules=["layer"],
        init_lora_weights=init_kind(config),
        fan_in_fan_out=as_conv1d,
        **{field: value for field in own if (value := getattr(config, field, None)) is not None},
    )
