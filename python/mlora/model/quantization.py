"""Which quantised base models there are, and Transformers' objects that read and make them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from mlora.config.sections import QuantizationConfig
from mlora.errors import RunError, first_line
from mlora.model.base_info import SERVED, quantization_of

_GROUP = 32
"""Numbers that share a scale with `torchao-int4`, unless `group_size` says otherwise."""
_KERNELS = {"gptq": "torch", "awq": "torch_awq"}
"""Kernels of gptqmodel that leave the weights packed as in the checkpoint, on every device."""
_GPTQMODEL = "gptqmodel defuser device-smi logbar pypcre tokenicer, and pip install requests threadpoolctl"
"""gptqmodel and what it imports; its metadata asks for another torch."""


def quantizer_of(
    source: str, config: Any, chosen: QuantizationConfig | None, dtype: torch.dtype, device: torch.device
) -> HfQuantizer | None:
    """Returns what reads or makes a base model's quantised weights; None if they are plain.

    Args:
        source: the base model, for messages.
        config: of the base model; `base_info.quantization_of` has accepted what it says.
        chosen: how a plain checkpoint is quantised; None: not at all.
        dtype: of the activations.
        device: where the weights will be.

    Raises:
        RunError: a package is missing, or the checkpoint's own config cannot be read; in one line.
    """
    said = quantization_of(source, config)
    if said is None and chosen is None:
        return None
    if said is not None and chosen is not None:
        raise RunError(
            f"quantization: {source} is quantized already ({said['quant_method']}); remove quantization, or "
            "name the original model as base_model"
        )
    needs = SERVED[said["quant_method"]] if said is not None else (_package(chosen),)
    for package in needs:
        if find_spec(package) is None:
            what = "base_model: its weights need" if said is not None else "quantization: its method needs"
            names = f"--no-deps {_GPTQMODEL}" if package == "gptqmodel" else package
            raise RunError(f"{what} the package {package}, which is not installed: pip install {names}")
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        if "gptqmodel" in needs:
            _import_gptqmodel()
        options = with_kernel(said) if said is not None else transformers_config(chosen, dtype)
        found: HfQuantizer = AutoHfQuantizer.from_config(options, pre_quantized=said is not None)
        found.validate_environment(device_map={"": device})
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, ImportError) as error:
        raise RunError(
            f"base_model: {source}: its quantization cannot be read: {first_line(error)}"
        ) from error
    return found


def _import_gptqmodel() -> None:
    """Imports it with its banner and reports kept off the standard output, which is for results."""
    from logbar import LogBar

    LogBar.shared().setLevel(logging.ERROR)
    import gptqmodel  # noqa: F401


def with_kernel(said: dict[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint says of its quantisation, with a kernel that leaves its weights packed so."""
    method = said["quant_method"]
    return {**said, "backend": _KERNELS[method]} if method in _KERNELS else said


def transformers_config(chosen: QuantizationConfig | None, dtype: torch.dtype) -> Any:
    """Returns Transformers' config of a method; its package must be installed."""
    assert chosen is not None
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if chosen.method == "bnb-int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    if chosen.method in ("bnb-nf4", "bnb-fp4"):
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=chosen.method.removeprefix("bnb-"),
            bnb_4bit_use_double_quant=chosen.double_quant,
            bnb_4bit_compute_dtype=getattr(torch, chosen.compute_dtype) if chosen.compute_dtype else dtype,
        )
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        PerRow,
    )

    if chosen.method == "torchao-float8":
        return TorchAoConfig(Float8WeightOnlyConfig())
    if chosen.method == "torchao-int8":
        granularity = PerGroup(chosen.group_size) if chosen.group_size else PerRow()
        return TorchAoConfig(Int8WeightOnlyConfig(granularity=granularity))
    group = PerGroup(chosen.group_size or _GROUP)
    # torchao's packed int4 tensors serve no CPU
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=getattr(torch, "int4"), granularity=group))  # noqa: B009


def prepare_skeleton(
    model: PreTrainedModel, quantizer: HfQuantizer, dtype: torch.dtype, device: torch.device
) -> None:
    """Replaces layers of a model without weights by those that hold quantised ones.

    Raises RunError if the numbers that share a scale do not divide a layer's width.
    """
    model.hf_quantizer = quantizer  # type: ignore[assignment]
    quantizer.preprocess_model(model, dtype=dtype, device_map={"": device}, checkpoint_files=None)
    size = group_size(quantizer)
    for name, module in model.named_modules() if size else ():
        if not isinstance(module, nn.Linear) or module.in_features % size == 0:
            continue
        if quantizer.param_needs_quantization(model, f"{name}.weight"):
            raise RunError(
                f"quantization.group_size: {size} does not divide {module.in_features}, the width of {name}; "
                "choose a divisor of the widths of all linear layers"
            )


def group_size(quantizer: HfQuantizer) -> int:
    """Returns how many neighbouring numbers share a scale where torchao makes the weights; else 0."""
    how: Any = getattr(quantizer.quantization_config, "quant_type", None)
    if quantizer.pre_quantized:
        return 0
    return int(getattr(getattr(how, "granularity", None), "group_size", 0))


def finish_reading(model: PreTrainedModel) -> None:
    """Has GPTQ's zeros read as its layers have them, which its files do not, once the weights are there."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is not None and quantizer.quantization_config.quant_method in _KERNELS:
        quantizer.postprocess_model(model)


def read_metadata(model: PreTrainedModel, paths: Iterable[str]) -> None:
    """Gives torchao what the checkpoint's files say of their tensors."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    paths = list(paths)
    if quantizer is not None and quantizer.pre_quantized and hasattr(quantizer, "set_metadata") and paths:
        quantizer.set_metadata(paths)


def _package(chosen: QuantizationConfig | None) -> str:
    assert chosen is not None
    return "bitsandbytes" if chosen.method.startswith("bnb-") else "torchao"
