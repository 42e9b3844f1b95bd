"""Train many LoRA adapters over one frozen base model in one batch."""

from .backends.selection import use_backend
from .nn import (
    MultiLoRALinear,
    adapter_parameters,
    add_adapter,
    convert_model,
    disable_adapter,
    from_peft,
    load_adapter,
    merge_and_unload,
    pack_base,
    print_trainable_parameters,
    remove_adapter,
    route,
    save_adapter,
)
from .ops.dropout import LoRADropout
from .ops.functional import multi_lora_linear
from .ops.segments import SegmentLayout

__all__ = [
    "LoRADropout",
    "MultiLoRALinear",
    "SegmentLayout",
    "adapter_parameters",
    "add_adapter",
    "convert_model",
    "disable_adapter",
    "from_peft",
    "load_adapter",
    "merge_and_unload",
    "multi_lora_linear",
    "pack_base",
    "print_trainable_parameters",
    "remove_adapter",
    "route",
    "save_adapter",
    "use_backend",
]
