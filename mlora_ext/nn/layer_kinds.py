"""The classes of modules that adapters can be put on."""

from __future__ import annotations

from torch import nn

from .adapter_layer import AdapterLayer
from .linear import MultiLoRALinear
from .parameters.experts import MultiLoRAExperts
from .parameters.matrix import MultiLoRAMatrix

LAYER_KINDS: tuple[type[AdapterLayer], ...] = (MultiLoRALinear, MultiLoRAExperts, MultiLoRAMatrix)


def layer_kind(module: nn.Module) -> type[AdapterLayer]:
    """Returns the class that serves a module, converted or not.

    Raises:
        ValueError: adapters cannot be put on this module.
    """
    for kind in LAYER_KINDS:
        if kind.serves(module):
            return kind
    raise ValueError(f"adapters cannot be put on a {type(module).__name__}")
