"""The classes of modules that adapters can be put on."""

from __future__ import annotations

from torch import nn

from ..adapters.trained_parts import TRAINED_PARTS
from .adapter_layer import AdapterLayer
from .embedding import MultiLoRAEmbedding
from .linear import MultiLoRALinear
from .over_module import OverModule
from .parameters.experts import MultiLoRAExperts, MultiLoRAGivenRows
from .parameters.matrix import MultiLoRAMatrix
from .trained.copies import TrainedCopies
from .trained.row_head import TrainedRowsLinear
from .trained.sample_copies import SampleCopies
from .trained.task_heads import TaskHeads

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
