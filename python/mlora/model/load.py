"""Loads a base model, checked, frozen and converted: all of it, or one stage.

A stage's tensors are read from the checkpoint by name, never those of other stages.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

import mlora_ext
from mlora.config.sections import QuantizationConfig
from mlora.model.base_info import quantization_of
from mlora.model.base_model import BaseModel, take_apart
from mlora.model.checkpoint_tensors import cached_path, files_of, fill, open_tensors, stage_to, wanted_keys
from mlora.model.cut import BlockSpan, Cut, cut_model
from mlora.model.pretrained import load_whole, refuse_missing, skeleton, told_in_one_line
from mlora.model.probe import check_packing
from mlora.model.quantization import finish_reading, prepare_skeleton, quantizer_of, read_metadata
from mlora.offload.options import IN_MEMORY, OffloadOptions
from mlora_ext.convert.model import zero_base_dropout
from mlora_ext.frozen.quantized.families import family_of
from mlora_ext.library import check_library


def load_base(
    source: str | Path | PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    span: BlockSpan | None = None,
    offload: OffloadOptions = IN_MEMORY,
    quantization: QuantizationConfig | None = None,
) -> BaseModel:
    """Loads a causal language model, checks that packed rows give its logits, freezes and converts it.

    Args:
        source: a folder, a hub id, or a model of this dtype, which is converted in place.
        span: the stage to load and check without the rest; default: the whole model.
        offload: whether the blocks' linear weights stay on disk.
        quantization: how the weights of a plain checkpoint are quantised while they are read.

    Raises:
        ValueError: it cannot be loaded or cut, or packed rows give other logits; in one line. Also if a
            model that is in memory already, on a GPU, or quantised is asked to stay on the host or on disk.
        OSError: a folder for scratch files is missing or lacks room.
    """
    if span is not None and span.stages == 1:
        span = None
    cut, streamed = None, None
    if offload.base != "device" and device.type != "cpu":
        raise ValueError(f"offload.base: {offload.base} serves models on the CPU so far, got device {device}")
    if quantization is not None and isinstance(source, PreTrainedModel):
        raise ValueError(
            "quantization: quantises a model while its files are read; give its folder or hub id"
        )
    if offload.base == "disk":
        if isinstance(source, PreTrainedModel):
            raise ValueError("offload.base: disk reads a model from its files; give its folder or hub id")
        check_library()
        from mlora.model.streamed_base import load_streamed  # needs the compiled library

        refuse_quantized(str(source), quantization, "offload.base: disk")
        cut, streamed = load_streamed(str(source), span, dtype, offload)
        model = cut.model
        cut = None if span is None else cut
    elif isinstance(source, PreTrainedModel):
        model = source
        cut = None if span is None else cut_model(model, span)
    elif span is None:
        model = load_whole(str(source), dtype, quantization, device)
    else:
        cut = load_stage(str(source), span, device, dtype, quantization)
        model = cut.model
    quantized = any(family_of(module) for module in model.modules())
    given = _dtype_of(model, cut)
    if given != dtype:
        raise ValueError(f"base_model: expected weights of dtype {dtype}, got {given}; pass dtype={given}")
    if cut is not None:
        stage_to(model, device)
    elif not quantized:
        model.to(device)  # type: ignore[arg-type]
    base = take_apart(model, cut)
    if streamed is None and not quantized:
        check_packing(base)
    mlora_ext.convert_model(model, {}, every_linear=True)
    if streamed is not None:
        streamed.put_into(model)
        base.stream = streamed.stream
    if quantized and cut is None and not isinstance(source, PreTrainedModel):
        _off_the_file(model)
    if quantized or streamed is not None:
        check_packing(base)  # bitsandbytes' own layers round activations in evaluation mode
    return base


def _dtype_of(model: PreTrainedModel, cut: Cut | None) -> torch.dtype:
    """Returns the dtype of the first weight that is here and not quantised."""
    here = (p.dtype for p in model.parameters() if cut is None or not p.is_meta)
    return next(dtype for dtype in here if dtype.is_floating_point and dtype.itemsize > 1)


def _off_the_file(model: PreTrainedModel) -> None:
    """Copies tensors that lie in the checkpoint's mapped file: its pages count as this process's memory."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in copies:
                    new = tensor.detach().clone()
                    is_parameter = isinstance(tensor, nn.Parameter)
                    copies[id(tensor)] = nn.Parameter(new, requires_grad=False) if is_parameter else new
                tensors[name] = copies[id(tensor)]


def refuse_quantized(source: str, quantization: QuantizationConfig | None, what: str) -> None:
    """Raises ValueError if a base model is or would be quantised, which `what` does not serve."""
    if (
        quantization is not None
        or quantization_of(source, AutoConfig.from_pretrained(source, trust_remote_code=False)) is not None
    ):
        raise ValueError(f"{what} does not serve a quantized base model")


def load_trained(
    source: str | PreTrainedModel, device: torch.device, dtype: torch.dtype, offload: OffloadOptions
) -> BaseModel:
    """Loads a whole causal language model whose own weights are trained; it is not converted.

    Args:
        source: a folder, a hub id, or a model of this dtype.
        offload: with `base="disk"` the matrices of its blocks are in scratch files.

    Raises:
        ValueError: as `load_base`.
        OSError: a folder for scratch files is missing or lacks room.
    """
    if device.type != "cpu":
        raise ValueError(f"method: full serves models on the CPU so far, got device {device}")
    check_library()
    streamed = None
    if offload.base == "disk":
        from mlora.model.streamed_base import load_streamed  # needs the compiled library

        if isinstance(source, PreTrainedModel):
            raise ValueError("offload.base: disk reads a model from its files; give its folder or hub id")
        refuse_quantized(source, None, "method: full")
        cut, streamed = load_streamed(source, None, dtype, offload, trained=True)
        model = cut.model
        model.tie_weights()  # each was read under its own name
    else:
        model = source if isinstance(source, PreTrainedModel) else load_whole(source, dtype)
        if any(family_of(module) for module in model.modules()):
            raise ValueError("method: full does not serve a quantized base model")
    if model.dtype != dtype:
        raise ValueError(f"base_model: expected weights of dtype {dtype}, got {model.dtype}")
    model.requires_grad_(True)
    if stopped := zero_base_dropout(model):
        warnings.warn(f"{stopped} dropouts of the base model were set to 0", stacklevel=2)
    base = take_apart(model)
    base.stream = None if streamed is None else streamed.stream
    return base


def load_stage(
    source: str,
    span: BlockSpan,
    device: torch.device,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None = None,
) -> Cut:
    """Builds a model's skeleton and reads the weights of one stage into it; in evaluation mode.

    From the hub, only files with weights of this stage are fetched. The weights have the bits that
    `from_pretrained` gives them; Transformers keeps some in fp32 whatever `dtype` is. ValueError if the model
    cannot be loaded, has no safetensors, or weights are missing. `quantization`: as for `load_base`.
    """
    model = skeleton(source, dtype)
    quantizer = quantizer_of(source, model.config, quantization, dtype, device)
    if quantizer is not None:
        prepare_skeleton(model, quantizer, dtype, device)
    cut = cut_model(model, span)
    with told_in_one_line(source), ExitStack() as stack:
        files = files_of(source, getattr(model.config, "transformers_weights", None))
        wanted = wanted_keys(cut, files)
        names = {files[key] for key in wanted.values()}
        read_metadata(model, filter(None, (cached_path(source, name) for name in sorted(names))))
        missing = fill(cut, open_tensors(source, wanted, files, stack), device, dtype)
    refuse_missing(source, missing)
    with told_in_one_line(source):
        finish_reading(model)
    return cut
