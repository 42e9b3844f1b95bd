"""Frozen weights packed once for oneDNN: faster products for twice the memory, where it is asked for."""

from __future__ import annotations

from torch import nn

from ..gemm import PackedWeight, packs
from .linear import MultiLoRALinear


def pack_base(model: nn.Module) -> int:
    """Keep the frozen weights of all converted layers in oneDNN's own layouts too, one for each direction.

    Every product with them is then faster on a CPU, those of few rows the most. The plain weights stay, for
    `state_dict` and for compiled graphs, which use them. Weights that change, as by `load_state_dict`, are
    packed again at their next use; after in-place changes through `.data`, which PyTorch does not count, call
    this again. Layers that are converted later are not packed until then either.

    Args:
        model: a converted model on a CPU, in fp32 or bf16.

    Returns:
        Bytes that the packed weights take beside the plain ones: twice those of the plain ones.

    Raises:
        ValueError: if no layer is converted, or oneDNN does not serve the weights; names the layer.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiLoRALinear)]
    if not layers:
        raise ValueError("model: expected layers converted by mlora_ext.convert_model, found none")
    for layer in layers:
        if layer.weight.is_inference():
            raise ValueError(
                f"{layer.name}: its weight was made in inference mode, where PyTorch counts no "
                "changes; load or clone it outside of torch.inference_mode()"
            )
        if not packs(layer.weight):
            dtype = str(layer.weight.dtype).removeprefix("torch.")
            raise ValueError(
                f"{layer.name}: oneDNN does not serve {dtype} weights on {layer.weight.device.type} with "
                "this torch and processor; leave the base as it is, without pack_base"
            )
    for layer in layers:
        layer.packed = PackedWeight()
        layer.packed.of(layer.plain_weight)
    return sum(2 * layer.weight.nbytes for layer in layers)
