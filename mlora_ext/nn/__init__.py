"""Layers with adapters: conversion, routes, adding and removing adapters, PEFT's folders and models."""

from .active_adapters import disable_adapter, print_trainable_parameters
from .adapter_weights import adapter_parameters
from .add_remove import add_adapter, remove_adapter
from .bank import AdapterBank
from .checkpointing import checkpoint_contexts
from .convert import convert_model, load_adapter
from .frozen_weights import pack_base, set_frozen_weights
from .held_gradients import HeldGradients, hold_gradients
from .interop.merging import merge_and_unload
from .interop.peft_folder import save_adapter
from .interop.peft_model import from_peft
from .linear import MultiLoRALinear
from .routing.router import route
from .start.from_data import initialise_from_data
from .start.from_weights import initialise_from_weights

__all__ = [
    "AdapterBank",
    "HeldGradients",
    "MultiLoRALinear",
    "adapter_parameters",
    "add_adapter",
    "checkpoint_contexts",
    "convert_model",
    "disable_adapter",
    "from_peft",
    "hold_gradients",
    "initialise_from_data",
    "initialise_from_weights",
    "load_adapter",
    "merge_and_unload",
    "pack_base",
    "print_trainable_parameters",
    "remove_adapter",
    "route",
    "save_adapter",
    "set_frozen_weights",
]
