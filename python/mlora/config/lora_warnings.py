"""Warnings about ``lora`` blocks that PEFT accepts but that are probably mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlora.config.aliases import nearest
from mlora_ext.nn.targets import features, is_linear, target_layers

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn


def lora_warnings(model: nn.Module, name: str, lora: LoraConfig) -> list[str]:
    """Returns warnings about entries that match no layer, and one if a rank exceeds what a layer can use."""
    from peft.utils.other import get_pattern_key

    modules = {key: module for key, module in model.named_modules() if ".lora_" not in key}
    layers = target_layers(model, name, lora)
    lines = []
    if lora.target_modules is not None and not isinstance(lora.target_modules, str):
        known = list(dict.fromkeys(key.rpartition(".")[2] for key, m in modules.items() if is_linear(m)))
        for entry in sorted(lora.target_modules):
            if not any(f".{key}".endswith(f".{entry}") for key in modules):
                near = nearest(entry, known, "linear layers")
                lines.append(f"{name}: lora.target_modules: {entry!r} matches nothing in the model; {near}")
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = list(getattr(lora, field) or ())
        used = {get_pattern_key(patterns, key) for key in layers}
        lines += [
            f"{name}: lora.{field}: {pattern!r} applies to none of the adapter's layers"
            for pattern in patterns
            if pattern not in used
        ]
    for key, spec in layers.items():
        width = min(features(modules[key]))
        if spec.rank > width:
            lines.append(f"{name}: lora.r: {spec.rank} is too high; {key} can use {width} at most")
            break
    return lines
