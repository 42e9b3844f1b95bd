"""Frozen weights packed once for oneDNN, where it is asked for: faster, for about three times the memory."""

from __future__ import annotations

from torch import nn

from ..frozen.plain import PackedWeight, packs
from .linear import MultiLoRALinear


def pack_base(model: nn.Module) -> int:
    """Keep the frozen weights of all converted layers in oneDNN's own layouts too, one for each direction.

    Products with them are then faster on a CPU, those of few rows the most. The plain weights stay, for
    `state_dict`, and for compiled graphs and autocast, which use them. Weights that change, as by
    `load_state_dict` or an in-place operation, are packed again at their next use; after writes through
    `.data` or numpy, which PyTorch does not count, call this again. Layers that are converted later are
    packed at their first use. Where some layers are on the meta device, because other processes
    hold them, the others are packed.

    Args:
        model: a converted model on a CPU, in fp32 or bf16.

    Returns:
        Bytes that the packed weights take beside the plain ones: about twice theirs, more for narrow layers,
        which oneDNN pads.

    Raises:
        ValueError: if no layer is converted, or oneDNN does not serve a weight; names the layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiLoRALinear)]
    if not layers:
        raise ValueError("model: expected layers converted by mlora_ext.convert_model, found none")
    layers = [layer for layer in layers if not layer.weight.is_meta] or layers
    for layer in layers:
        _check(layer)
    shared: dict[int, PackedWeight] = {}
    for layer in layers:
        layer.packed = shared.setdefault(id(layer.weight), PackedWeight())
        layer.packed.of(layer.plain_weight)
        layer.router.packs_base = True
    return sum(packed.nbytes for packed in shared.values())


def _check(layer: MultiLoRALinear) -> None:
    weight = layer.weight
    if weight.is_inference():
        raise ValueError(
            f"{layer.name}: its weight was made in inference mode, where PyTorch counts no changes; load or "
            "clone it outside of torch.inference_mode()"
        )
    if not packs(weight):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ValueError(
            f"{layer.name}: oneDNN does not serve {dtype} weights of shape {list(weight.shape)} on "
            f"{weight.device.type} with this torch and processor, at best float32 and bfloat16 on a CPU; "
            "leave pack_base out"
        )
