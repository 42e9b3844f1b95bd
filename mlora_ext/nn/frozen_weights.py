"""Sets which kind of frozen weight a converted model's layers use."""

from __future__ import annotations

from torch import nn

from ..frozen.packed import PackedCache, PackedWeight, packs
from ..frozen.registry import frozen_kind
from ..frozen.weight import FrozenKind
from .linear import MultiLoRALinear


def set_frozen_weights(model: nn.Module, kind: str | FrozenKind) -> int:
    """Gives all converted layers of a model another kind of frozen weight.

    Layers that are converted later get it, too. Layers on the meta device, which other processes hold, are
    skipped.

    Args:
        model: a converted model, or a part of one.
        kind: `plain`, `packed`, another registered name, or a function that makes a layer's weight; see
            `mlora_ext.frozen.weight.FrozenWeight`.

    Returns:
        Bytes that these layers' weights take, including everything that is kept beside them.

    Raises:
        ValueError: if no layer is converted, or the kind is unknown.

    Example:
        >>> mlora_ext.set_frozen_weights(model, "packed")
    """
    make = frozen_kind(kind) if isinstance(kind, str) else kind
    layers = _layers(model)
    for layer in layers:
        layer.frozen = make(layer)
        layer.router.frozen_kind = make
    return sum(layer.frozen.nbytes for layer in layers)


def pack_base(model: nn.Module) -> int:
    """Also keeps the frozen weights of all converted layers in oneDNN's own layouts, one per direction.

    This speeds up products with them on a CPU, most of all products of few rows. The plain weights stay:
    `state_dict`, compiled graphs and autocast use them. A weight that changes, as by `load_state_dict` or an
    in-place operation, is packed again at its next use. PyTorch does not count writes through `.data` or
    numpy: call this again after them. Layers that are converted later are packed at their first use. Layers
    on the meta device, which other processes hold, are skipped.

    Args:
        model: a converted model on a CPU, in fp32 or bf16.

    Returns:
        Bytes of the packed copies: about twice the plain weights, more for narrow layers, which oneDNN pads.

    Raises:
        ValueError: if no layer is converted, or oneDNN does not serve a weight; names the layer.
    """
    layers = _layers(model)
    for layer in layers:
        _check(layer)
    shared: dict[int, PackedCache] = {}
    for layer in layers:
        cache = shared.setdefault(id(layer.weight), PackedCache())
        layer.frozen = PackedWeight(layer, cache)
        cache.of(layer.frozen.dense())
        layer.router.frozen_kind = PackedWeight
    return sum(cache.nbytes for cache in shared.values())


def _layers(model: nn.Module) -> list[MultiLoRALinear]:
    """Returns the converted layers that are not on the meta device; if all are, returns all."""
    layers = [module for module in model.modules() if isinstance(module, MultiLoRALinear)]
    if not layers:
        raise ValueError("model: expected layers converted by mlora_ext.convert_model, found none")
    return [layer for layer in layers if layer.frozen.device.type != "meta"] or layers


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
