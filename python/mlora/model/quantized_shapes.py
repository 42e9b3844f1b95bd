"""What quantised weights take, without any weight: for forecasts of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from mlora.errors import first_line
from mlora_ext import MultiLoRALinear
from mlora_ext.frozen.quantized.blocks import QuantizedWeight
from mlora_ext.frozen.quantized.families import family_of, frozen_weight_of, is_gptqmodel, is_library_layer
from mlora_ext.frozen.quantized.torchao import stored_bytes
from mlora_ext.targets.find import linear_layers

_BLOCK, _SCALES = 64, 256
"""Numbers that share a scale in bitsandbytes' 4-bit formats; scales that share one, if they are quantised."""
_TABLE = 4 * 256 + 4
"""Bytes of the table and the offset by which 8-bit scales are read."""
_SAMPLE_ROWS = 64


class ShapedWeight(QuantizedWeight):
    """A quantised weight without numbers: products make what a real one makes.

    Args:
        shape: `(O, D)`.
        dtype: of x.
        nbytes: of the weight that it stands for.
        compute_dtype: as in `QuantizedWeight`.
        row_step: as in `QuantizedWeight`.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        nbytes: int,
        compute_dtype: torch.dtype | None = None,
        row_step: int = 1,
    ) -> None:
        self._shape, self._dtype, self._nbytes = shape, dtype, nbytes
        self._device = torch.device("meta")
        self.compute_dtype, self.row_step = compute_dtype, row_step

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Meta until the layer's other tensors have moved, as its own weight would be."""
        return self._device

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def moved(self) -> None:
        """Follows the layer to the CPU, where dry runs are made."""
        self._device = torch.device("cpu")

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(end - begin, self._shape[1], dtype=dtype, device="cpu")


def shapes_of_model(model: PreTrainedModel) -> dict[str, ShapedWeight]:
    """Returns the quantised weights of a loaded model, converted or not, by the layer's name."""
    found = {}
    for name, module in model.named_modules():
        weight: Any = module.frozen if isinstance(module, MultiLoRALinear) else None
        if family_of(module) is not None:
            weight = frozen_weight_of(module, _holder(module), model.dtype)
        if isinstance(weight, QuantizedWeight):
            more = (weight.compute_dtype, weight.row_step)
            found[name] = ShapedWeight(weight.shape, weight.dtype, weight.nbytes, *more)
    return found


def _holder(module: nn.Module) -> nn.Module:
    """Returns a module with the same weight, whose tensors can be replaced."""
    holder = nn.Module()
    holder.register_parameter("weight", module._parameters.get("weight"))
    return holder


def shapes_of_skeleton(
    model: PreTrainedModel, quantizer: HfQuantizer, dtype: torch.dtype
) -> dict[str, ShapedWeight]:
    """Returns the weights that a skeleton will have, by the layer's name.

    Layers of gptqmodel become plain ones without numbers, so that all skeletons are alike.

    Args:
        model: prepared by `prepare_skeleton`, not converted.
        quantizer: makes or reads the weights.
        dtype: of the activations.
    """
    known: dict[tuple[int, int], ShapedWeight] = {}
    found = {}
    for name, module in linear_layers(model).items():
        if is_gptqmodel(module):
            found[name] = _of_gptqmodel(module, quantizer.quantization_config, dtype)
            model.set_submodule(name, _plain(module, dtype))
            continue
        if not isinstance(module, nn.Linear) or not _is_quantised(model, quantizer, name, module):
            continue
        shape = (module.out_features, module.in_features)
        if shape not in known:
            known[shape] = _shaped(shape, quantizer.quantization_config, dtype)
        found[name] = known[shape]
    return found


def _is_quantised(model: PreTrainedModel, quantizer: HfQuantizer, name: str, module: nn.Module) -> bool:
    return is_library_layer(module) or quantizer.param_needs_quantization(model, f"{name}.weight")


def _of_gptqmodel(module: nn.Module, config: Any, dtype: torch.dtype) -> ShapedWeight:
    """Returns the weight of a layer on the meta device; act-order adds the group of each input."""
    own: Any = module
    names = ("qweight", "qzeros", "scales", *(("g_idx",) if config.desc_act else ()))
    nbytes = sum(int(getattr(own, name).nbytes) for name in names)
    return ShapedWeight((own.out_features, own.in_features), dtype, nbytes, None, 32 // own.bits)


def _plain(module: nn.Module, dtype: torch.dtype) -> nn.Linear:
    own: Any = module
    bias = own.bias is not None
    plain = nn.Linear(own.in_features, own.out_features, bias, device="meta", dtype=dtype)
    return plain.requires_grad_(False)


def _shaped(shape: tuple[int, int], config: Any, dtype: torch.dtype) -> ShapedWeight:
    (rows, columns), numbers = shape, math.prod(shape)
    if getattr(config, "load_in_8bit", False):
        return ShapedWeight(shape, dtype, numbers + 4 * rows)
    if getattr(config, "load_in_4bit", False):
        scales = -(-numbers // _BLOCK)
        twice = config.bnb_4bit_use_double_quant
        kept = scales + 4 * -(-scales // _SCALES) + _TABLE if twice else 4 * scales
        nbytes = -(-numbers // 2) + kept
        step = 1 if columns % _BLOCK == 0 else rows
        return ShapedWeight(shape, dtype, nbytes, config.bnb_4bit_compute_dtype, step)
    return ShapedWeight(shape, dtype, -(-_of_rows(columns, config, dtype) * rows // _SAMPLE_ROWS))


def _of_rows(columns: int, config: Any, dtype: torch.dtype) -> int:
    """Returns the bytes that torchao needs for some rows, by quantising zeros."""
    from torchao.quantization import quantize_

    layer = nn.Linear(columns, _SAMPLE_ROWS, bias=False, dtype=dtype, device="cpu").requires_grad_(False)
    layer.weight.zero_()
    try:
        quantize_(layer, config.get_apply_tensor_subclass())
    except (ValueError, NotImplementedError, AssertionError, ImportError, RuntimeError) as error:
        raise ValueError(f"quantization: torchao cannot make this: {first_line(error)}") from error
    return stored_bytes(layer.weight.detach())


def put_shapes(model: PreTrainedModel, shapes: Mapping[str, ShapedWeight]) -> None:
    """Gives a converted skeleton's layers these weights in place of their own."""
    for name, shaped in shapes.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, MultiLoRALinear)
        layer.frozen = shaped
        layer._parameters["weight"] = None
