"""Taking the adapters of a PEFT model over: from_peft."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .convert import convert_model, plan_adapter, refuse_offloaded
from .targets import check_config, check_name
from .weights import check_weights, write_weights

if TYPE_CHECKING:
    from peft import PeftModel


def from_peft(peft_model: PeftModel, *, seed: int = 0) -> nn.Module:
    """Turn a PEFT model with LoRA adapters into a converted model with the same adapters and weights.

    Args:
        peft_model: its base model is taken out and converted in place; do not use the PEFT model afterwards.
        seed: of dropout.

    Returns:
        The base model, converted.

    Raises:
        ValueError: if an adapter is not plain LoRA, is merged, or its config is not supported; the PEFT model
            is as it was then.
    """
    from peft.tuners.lora import LoraLayer

    configs: dict[str, Any] = dict(peft_model.peft_config)
    base: Any = peft_model.base_model.model
    for name, config in configs.items():
        check_name(name)
        check_config(name, config)
    weights: dict[str, dict[str, Any]] = {name: {} for name in configs}
    for key, module in base.named_modules():
        if isinstance(module, LoraLayer):
            if module.merged:
                raise ValueError(
                    f"peft_model: adapters of {key} are merged into the base; unmerge_adapter first"
                )
            for name in module.lora_A:
                weights[name][key] = (module.lora_A[name].weight.data, module.lora_B[name].weight.data)
    _refuse_unloading(peft_model, configs, weights)
    halves = all(
        w.dtype in (torch.float16, torch.bfloat16)
        for per in weights.values()
        for ab in per.values()
        for w in ab
    )
    model = convert_model(peft_model.unload(), configs, seed=seed, autocast_adapter_dtype=not halves)
    for name, layers in weights.items():
        write_weights(model, name, layers)
    return model


def _refuse_unloading(
    peft_model: PeftModel, configs: Mapping[str, Any], weights: Mapping[str, dict[str, Any]]
) -> None:
    """Refuse on a copy that shares all tensors, so that a refused PEFT model keeps its adapters."""
    shared = {id(tensor): tensor for tensor in (*peft_model.parameters(), *peft_model.buffers())}
    base: Any = copy.deepcopy(peft_model, shared).unload()  # type: ignore[arg-type]
    plans = {name: plan_adapter(base, name, config) for name, config in configs.items()}
    refuse_offloaded(base, plans)
    for name, plan in plans.items():
        check_weights(base, name, {key: spec.rank for key, spec in plan.items()}, weights[name])
