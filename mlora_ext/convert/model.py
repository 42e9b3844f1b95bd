"""Converts a model, which puts adapters on it: convert_model, and load_adapter from a PEFT folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
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
from ..targets.add_remove import plan_adapter, put_planned, refuse_state
from ..targets.entries import warn_of_entries
from ..warn_caller import warn_caller
from . import checkpointing, forward

if TYPE_CHECKING:
    from peft import LoraConfig


_RANDOM = ("dropout", "pdrop", "drop_path", "drop_prob", "layerdrop", "jitter_noise")


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
    warn = convert_silently(
        model, adapters, seed=seed, autocast_adapter_dtype=autocast_adapter_dtype, every_linear=every_linear
    )
    warn()
    return model


def convert_silently(
    model: nn.Module,
    adapters: Mapping[str, LoraConfig],
    *,
    seed: int = 0,
    autocast_adapter_dtype: bool = True,
    every_linear: bool = False,
) -> Callable[[], None]:
    """Does what `convert_model` does but warn; returns what warns.

    A warning may be an error, so the model must be complete before.
    """
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
    dropouts, batch_norms = zero_base_dropout(model), stop_batch_statistics(model)
    forward.install(model)
    checkpointing.install(model)
    adapter_interface.install(model)
    put_planned(model, adapters, plans, seed, autocast_adapter_dtype, every_linear)
    return partial(_warn_of_conversion, model, adapters, dropouts, batch_norms)


def _warn_of_conversion(
    model: nn.Module, adapters: Mapping[str, LoraConfig], dropouts: int, batch_norms: int
) -> None:
    """Gives the warnings of `convert_model`; so many dropouts and batch normalisations were stopped."""
    if dropouts:
        warn_caller(
            f"{dropouts} dropouts of the base model were set to 0; use lora_dropout to regularise an adapter"
        )
    warn_of_whole_batches(model, batch_norms)
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
    warn = convert_silently(model, {name: config}, seed=seed)
    write_weights(model, name, weights)
    warn()


def zero_base_dropout(model: nn.Module) -> int:
    """Sets every base dropout to 0: one mask for a whole batch makes its adapters depend on each other.

    Returns how many were not 0.
    """
    stopped = 0
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 0.0
            stopped += 1
        stopped += _zero_dropout_fields(module)
    return stopped + _zero_dropout_fields(getattr(model, "config", None))


def _zero_dropout_fields(owner: object) -> int:
    """Sets floats such as `attention_dropout`, which attention functions read, to 0; returns how many."""
    found = [
        key
        for key, value in getattr(owner, "__dict__", {}).items()
        if any(word in key for word in _RANDOM)
        and not key.startswith("summary_")
        and type(value) is float
        and 0 < value < 1
    ]
    for key in found:
        setattr(owner, key, 0.0)
    return len(found)


def is_converted(model: nn.Module) -> bool:
    """Whether `convert_model` has seen a model, or made layers of it; without adapters there may be none."""
    return "mlora_router" in model.__dict__ or any(isinstance(m, AdapterLayer) for m in model.modules())


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
