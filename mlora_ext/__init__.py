"""Train many LoRA adapters over one frozen base model in one batch."""

from .backends.selection import save_dropout_masks, use_backend, use_gpu_base_gemm
from .convert.checkpointing import checkpoint_contexts
from .convert.locate import find_sample_dims
from .convert.model import convert_model, load_adapter
from .convert.peft_model import from_peft
from .interop.merging import merge_and_unload
from .interop.peft_folder import save_adapter
from .layers.adapter_weights import adapter_parameters, disable_adapter, print_trainable_parameters
from .layers.frozen_weights import pack_base, set_frozen_weights
from .layers.held_gradients import HeldGradients, hold_gradients
from .layers.linear import MultiLoRALinear
from .ops.dropout import LoRADropout
from .ops.functional import multi_lora_linear
from .ops.segments import SegmentLayout
from .routing.router import route
from .start.from_data import initialise_from_data
from .start.from_weights import initialise_from_weights
from .targets.add_remove import add_adapter, remove_adapter

__all__ = [
    "HeldGradients",
    "LoRADropout",
    "MultiLoRALinear",
    "SegmentLayout",
    "adapter_parameters",
    "add_adapter",
    "checkpoint_contexts",
    "convert_model",
    "disable_adapter",
    "find_sample_dims",
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
