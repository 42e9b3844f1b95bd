"""Train many LoRA adapters over one frozen base model in one batch."""

from .backends.selection import save_dropout_masks, use_backend, use_gpu_base_gemm
from .nn import (
    HeldGradients,
    MultiLoRALinear,
    adapter_parameters,
    add_adapter,
    convert_model,
    disable_adapter,
    from_peft,
    hold_gradients,
    initialise_from_data,
    initialise_from_weights,
    load_adapter,
    merge_and_unload,
    pack_base,
    print_trainable_parameters,
    remove_adapter,
    route,
    save_adapter,
    set_frozen_weights,
)
from .ops.dropout import LoRADropout
from .ops.functional import multi_lora_linear
from .ops.segments import SegmentLayout

__all__ = [
    "HeldGradients",
    "LoRADropout",
    "MultiLoRALinear",
    "SegmentLayout",
    "adapter_parameters",
    "add_adapter",
    "convert_model",
    "disable_adapter",
    "from_peft",
    "hold_gradients",
    "initialise_from_data",
    "initialise_from_weights",
    "load_adapter",
    "merge_and_unload",
    "multi_lora_linear",
    "pack_base",
    "print_trainable_parameters",
    "remove_adapter",
    "route",
    "save_adapter",
    "save_dropout_masks",
    "set_frozen_weights",
    "use_backend",
    "use_gpu_base_gemm",
]
