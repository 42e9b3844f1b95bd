"""Layers with adapters: conversion, routes, adding and removing adapters, PEFT's folders and models."""

from .bank import AdapterBank
from .checkpointing import checkpoint_contexts
from .control import disable_adapter, print_trainable_parameters
from .convert import convert_model, load_adapter
from .frozen_weights import pack_base, set_frozen_weights
from .interop.merging import merge_and_unload
from .interop.peft_folder import save_adapter
from .interop.peft_model import from_peft
from .join import add_adapter, remove_adapter
from .linear import MultiLoRALinear
from .routing.router import route
from .weights import adapter_parameters

__all__ = [
    "AdapterBank",
    "MultiLoRALinear",
    "adapter_parameters",
    "add_adapter",
    "checkpoint_contexts",
    "convert_model",
    "disable_adapter",
    "from_peft",
    "load_adapter",
    "merge_and_unload",
    "pack_base",
    "print_trainable_parameters",
    "remove_adapter",
    "route",
    "save_adapter",
    "set_frozen_weights",
]
