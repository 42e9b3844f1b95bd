"""Initialises an adapter so that it makes up for the base's quantisation: initialise_from_weights.

Letters: D = d_in, O = d_out, R = rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.kind import LayerSpec
from ...adapters.lora import set_values
from ...adapters.lora_config import needs_weights
from ...frozen.quantized.families import is_quantized
from ..adapter_weights import adapter_layers
from ..linear import MultiLoRALinear
from ..routing.router import router_of
from .leading import leading_svd
from .statistics import signs_of
from .weights_folder import weights_in

ReadWeight = Callable[[str], Tensor]
"""Returns the weight that a layer had before it was quantised; ValueError if there is none."""


def initialise_from_weights(model: nn.Module, name: str, folder: str | os.PathLike[str]) -> None:
    """Gives an adapter of `init_lora_weights="loftq"` its initial values from the base's original weights.

    In each quantised layer, `scaling · B A` becomes the best approximation of rank R of `W - W_q`, where W is
    the original weight and W_q the dequantised one (LoftQ: Li et al., 2023, arXiv 2310.08659, section 3, for
    a W_q that is given). For a scaling of 1 it is what PEFT's `replace_lora_weights_loftq` computes, which
    takes no account of the scaling. Nothing else of the model changes. Layers that are not quantised begin
    as plain LoRA.

    Reads one layer's weight at a time.

    Args:
        model: converted, with a quantised base.
        name: of the adapter.
        folder: of the original model, with `model.safetensors`, or `model.safetensors.index.json` and its
            files; its tensors have the model's names, with or without the prefix of its base model.

    Raises:
        ValueError: the model has no such adapter, its config does not say `loftq`, the folder has no
            safetensors or lacks a layer's weight, or a weight is not the one that was quantised.

    Example:
        >>> config = LoraConfig(init_lora_weights="loftq", loftq_config=LoftQConfig())
        >>> model = convert_model(quantised_model, {"a": config})
        >>> initialise_from_weights(model, "a", "path/to/original")
    """
    router = router_of(model)
    router.check_names("name", [name])
    how = router.adapters[name].config.init_lora_weights
    if not needs_weights(router.adapters[name].config):
        raise ValueError(f"adapter {name!r}: init_lora_weights={how!r} needs no weights; expected 'loftq'")
    prefix = getattr(model, "base_model_prefix", "")
    start_from_weights(model, name, weights_in(Path(folder), prefix))


def start_from_weights(model: nn.Module, name: str, read: ReadWeight, only: str | None = None) -> int:
    """Writes the initial values of an adapter's quantised layers in this process; returns how many they are.

    `only`: the one layer that gets its values now; default: all.

    Raises ValueError, naming the layer, if its original weight is missing or is that of another model.
    """
    found = 0
    for key, layer in adapter_layers(model, name).items():
        if only not in (None, key) or not isinstance(layer, MultiLoRALinear) or not is_quantized(layer):
            continue
        own = layer.parameters_of(name)
        if own["lora_A"].is_meta:
            continue
        try:
            set_values(own, _nearest(read(key), layer, layer.specs[name]))
        except ValueError as error:
            raise ValueError(f"adapter {name!r}: layer {key}: {error}") from error
        found += 1
    router_of(model).adapters[name].awaits_start = False
    return found


_MOST_LOST = 0.4
"""The most that a quantisation changes W, relative to W_q: fp4 changed normal numbers by 0.12
and those of Student's t (3 degrees) by 0.19. A model that was tuned from the right one is not noticed."""


@torch.no_grad()
def _nearest(original: Tensor, layer: MultiLoRALinear, spec: LayerSpec) -> dict[str, Tensor]:
    """Returns `lora_A [R, D]` and `lora_B [O, R]` with `W_q + scaling · B A` nearest to the original W.

    Where a layer is too narrow for the rank, the other rows and columns are zeros. Where the quantisation
    changed nothing, A and B stay as they are.
    """
    residual_OD = _residual(original, layer)
    if not residual_OD.any():
        return {}
    u_OR, s_R, vh_RD = leading_svd(residual_OD, spec.rank)
    missing = max(0, spec.rank - len(s_R))
    root_R1 = (s_R / abs(spec.scaling)).sqrt().unsqueeze(1)
    signs_R1 = signs_of(vh_RD)  # of both halves of a pair: their product stays
    a_RD = vh_RD * root_R1 * signs_R1
    b_RO = u_OR.t() * root_R1 * signs_R1 * (1 if spec.scaling > 0 else -1)
    pad = (0, 0, 0, missing)
    return {"lora_A": nn.functional.pad(a_RD, pad), "lora_B": nn.functional.pad(b_RO, pad).t()}


def _residual(original: Tensor, layer: Any) -> Tensor:
    """Returns `W - W_q [O, D]` in fp32; ValueError if W_q is not a quantised form of the original.

    GPT-2's `Conv1D` keeps its weight as `[D, O]`, and a quantised layer no longer says so: the nearer of both
    ways counts.
    """
    quantised_OD = layer.frozen.dense().float()
    if not original.is_floating_point() or original.dtype.itemsize < 2:
        dtype = str(original.dtype).removeprefix("torch.")
        raise ValueError(f"its weight in the files is quantised ({dtype}); give the original model's folder")
    given = original.to(quantised_OD.device, torch.float32)
    shape = quantised_OD.shape
    found = [way - quantised_OD for way in (given, given.t()) if way.shape == shape]
    residual = min(found, key=lambda one: float(one.norm()), default=None)
    if residual is None or not residual.norm() <= _MOST_LOST * quantised_OD.norm():
        raise ValueError(
            f"its weight in the files, {list(original.shape)}, is not the one that was quantised, "
            f"{list(shape)}; give the original model's folder"
        )
    return residual
