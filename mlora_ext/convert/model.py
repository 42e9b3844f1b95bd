"""Converts a model, which puts adapters on it: convert_model, and load_adapter from a PEFT folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ..interop import adapter_interface
from ..interop.read_folder import load_into, read_adapter
from ..interop.side_files import warn_of_base
from ..layers.adapter_layer import AdapterLayer
from ..layers.adapter_weights import write_weights
from ..layers.batch_statistics import refuse_batch_statistics, stop_batch_statistics, warn_of_whole_batches
from ..routing.router import Router
from ..targets.add_remove import convert_layers, join, plan_adapter, refuse_state, regroup
from ..targets.entries import warn_of_entries
from . import checkpointing, forward
from .base_dropout import warn_of_stopped_dropouts, zero_base_dropout

if TYPE_CHECKING:
    from peft import LoraConfig


def convert_model(
    model: nn.Module,
    adapters: Mapping[str, LoraConfig],
    *,
    seed: int = 0,
    autocast_adapter_dtype: bool = True,
    every_linear: bool = False,
) -> nn.Module:
    """Freezes a model and puts adapters on it, in place.

    PEFT's own functions choose the layers, so adapters sit where PEFT would put them. Initial values have
    PEFT's distributions. They depend only on the seed, the adapter's name and the layer's name, never on
    other adapters. An entry of a config that matches nothing beside others is warned of. The base
    model's dropouts are set to 0, and its batch normalisation layers stay in evaluation mode; copies of them
    that adapters train (`modules_to_save`) do not.

    Args:
        model: any module with `nn.Linear` or `Conv1D` layers.
        adapters: a PEFT `LoraConfig` for each adapter name; `inference_mode=True` freezes the adapter.
        seed: for initial values and dropout.
        autocast_adapter_dtype: keep adapters of a bf16 or fp16 base in fp32, as PEFT does. Unlike in PEFT,
            `scaling x A^T` keeps the dtype of x: in an fp16 base, values above 65504 become inf.
        every_linear: also replace linear layers that no adapter targets, except the output head, so that they
            use the base GEMM that was measured to be the fastest.

    Returns:
        `model` itself. Its forward and `generate` take `adapter_names=`.

    Raises:
        ValueError: if the model is converted already, a name or config is not supported, or the targets match
            nothing. Also if conversion would lose a layer's hooks or replaced `forward`, if its weights are
            quantized in an unknown format, or if a BatchNorm keeps no running statistics. The model is
            unchanged then.

    Example:
        >>> model = convert_model(model, {"a": LoraConfig(r=8), "b": LoraConfig(r=64, use_rslora=True)})
        >>> out = model(input_ids=ids, adapter_names=["a", "a", "b"])
    """
    stopped = convert_silently(
        model, adapters, seed=seed, autocast_adapter_dtype=autocast_adapter_dtype, every_linear=every_linear
    )
    warn_of_conversion(model, adapters, stopped)
    return model


@dataclass
class Stopped:
    """How many modules of a base a conversion stopped, of which it warns.

    Attributes:
        dropouts: were set to 0.
        batch_norms: stay in evaluation mode.
    """

    dropouts: int
    batch_norms: int


def convert_silently(
    model: nn.Module,
    adapters: Mapping[str, LoraConfig],
    *,
    seed: int = 0,
    autocast_adapter_dtype: bool = True,
    every_linear: bool = False,
) -> Stopped:
    """Does what `convert_model` does but warn; returns what `warn_of_conversion` needs."""
    if not isinstance(adapters, Mapping):
        raise ValueError(
            f"adapters: expected configs by name, {{'a': LoraConfig(...)}}, got {type(adapters).__name__}"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a module, got {type(model).__name__}")
    if is_converted(model):
        raise ValueError("model: is already converted; use mlora_ext.add_adapter to add an adapter")
    _refuse_peft(model)
    plans = {name: plan_adapter(model, name, config) for name, config in adapters.items()}
    refuse_state(model, plans, every_linear)
    _refuse_generate(model)
    refuse_batch_statistics(model)
    model.__dict__["mlora_router"] = Router()
    model.requires_grad_(False)
    stopped = Stopped(zero_base_dropout(model), stop_batch_statistics(model))
    forward.install(model)
    checkpointing.install(model)
    adapter_interface.install(model)
    convert_layers(model, plans, autocast_adapter_dtype, every_linear)
    try:
        for name, config in adapters.items():
            join(model, name, config, plans[name], seed)
    finally:
        regroup(model)
    return stopped


def warn_of_conversion(model: nn.Module, adapters: Mapping[str, LoraConfig], stopped: Stopped) -> None:
    """Gives the warnings of `convert_model`; one may be an error, so the model must be complete before."""
    warn_of_stopped_dropouts(stopped.dropouts)
    warn_of_whole_batches(model, stopped.batch_norms)
    warn_of_entries(model, adapters)


def load_adapter(model: nn.Module, name: str, folder: str | os.PathLike[str], *, seed: int = 0) -> None:
    """Reads an adapter from a PEFT folder.

    If the model has an adapter of this name, it gets the folder's weights and keeps its dropout. Otherwise
    the adapter is added with the folder's config. A model that is not converted yet is converted. A warning
    says if the folder's `quantization.json` names another kind of base than the model's.

    Args:
        model: converted, or any module that `convert_model` takes.
        name: of the adapter in the model.
        folder: with adapter_config.json and adapter_model.safetensors (or .bin).
        seed: for dropout.

    Raises:
        ValueError: if a file is missing, the config is not supported, or a weight is NaN or infinite. Also if
            a layer is missing or has another shape, as in an adapter of another base, or if the scaling
            differs from that of the model's adapter. Also if the folder holds base weights (PEFT stores
            embeddings and heads) that differ from the model's. The model is unchanged then.
    """
    warn_of_base(model, name, folder)
    if is_converted(model):
        load_into(model, name, folder, seed=seed)
        return
    config, weights = read_adapter(model, name, Path(folder))
    stopped = convert_silently(model, {name: config}, seed=seed)
    write_weights(model, name, weights)
    warn_of_conversion(model, {name: config}, stopped)


def is_converted(model: nn.Module) -> bool:
    """Whether a model has layers that `convert_model` made."""
    return any(isinstance(module, AdapterLayer) for module in model.modules())


def _refuse_peft(model: nn.Module) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            "model: has PEFT layers; use mlora_ext.from_peft, which converts it and keeps its adapters"
        )


def _refuse_generate(model: nn.Module) -> None:
    if "generate" in vars(model):
        raise ValueError(
            "model: its `generate` was replaced on the instance, and conversion would discard the "
            "replacement; delete the attribute before you convert the model"
        )
