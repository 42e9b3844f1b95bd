"""What a linear layer of a base model is, and its sizes, converted or not."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..frozen.quantized.families import is_library_layer
from .adapter_layer import AdapterLayer
from .over_module import OverModule

# Computes `x @ W.T`, the same result as nn.Linear.
_FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module that is not converted computes `x W^T + b`, with a plain or quantised weight."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D) or is_library_layer(module) or _computes_as_linear(module)


def _computes_as_linear(module: nn.Module) -> bool:
    """Whether an nn.Linear subclass computes `x W^T + b` and holds only a plain weight and bias."""
    kind = type(module)
    if not isinstance(module, nn.Linear) or kind is NonDynamicallyQuantizableLinear:
        return False
    own = kind.forward is not nn.Linear.forward and f"{kind.__module__}.{kind.__qualname__}" != _FALCON
    state = {**module._parameters, **module._buffers, **module._modules}
    return not own and state.keys() == {"weight", "bias"} and type(state["weight"]) is nn.Parameter


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer stores its weight as `[d_in, d_out]`."""
    own = isinstance(module, nn.Linear) or is_library_layer(module)
    return bool(getattr(module, "fan_in_fan_out", not own))


def features(module: nn.Module) -> tuple[int, int]:
    """Returns d_in and d_out of a linear layer, converted or not."""
    if isinstance(module, OverModule):
        module = module.base
    if isinstance(module, AdapterLayer) or is_library_layer(module):
        return module.in_features, module.out_features  # type: ignore[return-value]
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)
