"""The classes of modules that adapters can be put on."""

from __future__ import annotations

from torch import nn

from ..adapters.trained_parts import TRAINED_PARTS
from .adapter_layer import AdapterLayer
from .copies import TaskHeads, TrainedCopies
from .embedding import MultiLoRAEmbedding, TrainedRowsLinear
from .experts import MultiLoRAExperts, MultiLoRAGivenRows
from .linear import MultiLoRALinear
from .over_module import OverModule
from .parameter_layer import MultiLoRAMatrix
from .sample_copies import SampleCopies

LAYER_KINDS: tuple[type[AdapterLayer], ...] = (
    MultiLoRALinear,
    MultiLoRAGivenRows,
    MultiLoRAExperts,
    MultiLoRAEmbedding,
    TrainedRowsLinear,
    TrainedCopies,
    SampleCopies,
    TaskHeads,
    MultiLoRAMatrix,
)


def layer_kind(module: nn.Module, kind: str = "lora") -> type[AdapterLayer]:
    """Returns the class that serves a module, converted or not.

    Args:
        kind: name of the kind of adapter, as in `LayerSpec.kind`.

    Raises:
        ValueError: adapters cannot be put on this module.
    """
    if isinstance(module, OverModule) and not isinstance(module, TaskHeads):
        module = module.base
    for layer in LAYER_KINDS:
        known = kind not in TRAINED_PARTS if layer.served is None else kind in layer.served
        if known and layer.serves(module):
            return layer
    raise ValueError(f"adapters cannot be put on a {type(module).__name__}")
