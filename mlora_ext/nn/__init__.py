"""Modules: `MultiLoRALinear`, converting models, routes, and PEFT's folders."""

from .bank import AdapterBank
from .checkpointing import checkpoint_contexts
from .convert import adapter_parameters, add_adapter, convert_model, from_peft, remove_adapter
from .folder import load_adapter, save_adapter
from .linear import MultiLoRALinear
from .routing import route

__all__ = [
    "AdapterBank",
    "MultiLoRALinear",
    "adapter_parameters",
    "add_adapter",
    "checkpoint_contexts",
    "convert_model",
    "from_peft",
    "load_adapter",
    "remove_adapter",
    "route",
    "save_adapter",
]
