"""Sets which kind of frozen weight a converted model's layers use."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..frozen.packed import PackedCache, PackedWeight, packs
from ..frozen.plain import PlainWeight
from ..frozen.quantized.blocks import QuantizedWeight
from ..frozen.registry import frozen_kind
from ..frozen.weight import FrozenKind
from ..routing.router import router_of
from .linear import MultiLoRALinear


def set_frozen_weights(model: nn.Module, kind: str | FrozenKind) -> int:
    """Gives all converted layers of a model another kind of frozen weight.

    Layers that are converted later get it, too. Layers on the meta device, which other processes hold, are
    skipped. `packed` is `pack_base`.

    Args:
        model: a converted model, or a part of one.
        kind: `plain`, `packed`, another registered name, or a function that makes a layer's weight; see
            `mlora_ext.frozen.weight.FrozenWeight`.

    Returns:
        Bytes that these layers' weights take, including everything that is kept beside them; a weight that
        several layers share counts once.

    Raises:
        ValueError: if no layer is converted, the kind is unknown, or `packed` does not serve a weight; names
            the layer. Also if `plain` is asked for where the original weight is gone, as in a quantised base.
            The model is unchanged then.

    Example:
        >>> mlora_ext.set_frozen_weights(model, "packed")
    """
    make = frozen_kind(kind) if isinstance(kind, str) else kind
    layers = _layers(model)
    if make is PackedWeight:
        _pack(layers)
    else:
        if make is PlainWeight:
            for layer in layers:
                _check_plain(layer, "plain")
        for layer in layers:
            layer.frozen = make(layer)
    router_of(model).frozen_kind = make
    return sum(layer.frozen.nbytes for layer in _without_ties(layers))


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
    whole = set_frozen_weights(model, "packed")
    return whole - sum(layer.weight.nbytes for layer in _without_ties(_layers(model)))


def _pack(layers: list[MultiLoRALinear]) -> None:
    """Checks all layers, then packs each weight once, however many layers share it."""
    for layer in layers:
        _check(layer)
    caches: dict[int, PackedCache] = {}
    for layer in layers:
        cache = caches.setdefault(id(layer.weight), PackedCache())
        layer.frozen = PackedWeight(layer, cache)
        cache.of(layer.frozen.dense())


def _without_ties(layers: list[MultiLoRALinear]) -> Iterable[MultiLoRALinear]:
    """Returns one layer for each weight; a layer without a weight of its own shares none."""
    weights = [(layer, layer._parameters.get("weight")) for layer in layers]
    return {id(layer if weight is None else weight): layer for layer, weight in weights}.values()


def _layers(model: nn.Module) -> list[MultiLoRALinear]:
    """Returns the converted layers that are not on the meta device; if all are, returns all."""
    layers = [module for module in model.modules() if isinstance(module, MultiLoRALinear)]
    if not layers:
        raise ValueError("model: expected layers converted by mlora_ext.convert_model, found none")
    return [layer for layer in layers if layer.frozen.device.type != "meta"] or layers


def _check_plain(layer: MultiLoRALinear, what: str) -> None:
    weight = layer._parameters.get("weight")
    if weight is None or isinstance(layer.frozen, QuantizedWeight):
        kind = type(layer.frozen).__name__
        raise ValueError(f"{layer.name}: {what} needs a plain weight, got frozen weights of kind {kind}")


def _check(layer: MultiLoRALinear) -> None:
    _check_plain(layer, "packing")
    weight = layer.weight
    if weight.is_inference():
        raise ValueError(
            f"{layer.name}: its weight was made in inference mode, where PyTorch does not notice changes; "
            "load or clone it outside of torch.inference_mode()"
        )
    if not packs(weight):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ValueError(
            f"{layer.name}: oneDNN does not serve {dtype} weights of shape {list(weight.shape)} on "
            f"{weight.device.type} with this torch and processor; pack float32 (or bfloat16, where the "
            "processor has it) weights on a CPU, or leave pack_base out"
        )
