"""A frozen linear layer, such as an output head, with trained rows of many adapters.

Letters: T rows of x, D = d_in, V = d_out, n trained rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ..adapters.kind import LayerSpec, ParameterSpec
from ..adapters.trained_parts import TRAINED_ROWS
from ..never_compiled import never_compiled
from ..routing.row_groups import by_adapter, row_groups
from ..warn_caller import warn_caller
from .over_module import OverModule, RowSource, plain_module
from .plain_linear import is_plain_linear, is_transposed
from .trained_rows import has_plain_rows, start_rows


class TrainedRowsLinear(RowSource, OverModule):
    """`y = x W_iᵀ + b` for the rows of adapter i, where `W_i` is W with the adapter's own rows of its tokens.

    The rows are the layer's own, or those of the embedding that it is tied to, as in PEFT's
    `TrainableTokensLayer`. The bias is the base's. PEFT leaves it out until it merges: see `peft_drops_bias`.
    """

    served = (TRAINED_ROWS,)

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        plain = plain_module(module)
        return is_plain_linear(plain) and not is_transposed(plain) and has_plain_rows(module)

    @classmethod
    def shapes(cls, module: nn.Module, spec: LayerSpec) -> dict[str, ParameterSpec]:
        if spec.tied_to:
            return {}
        weight: Any = plain_module(module).weight
        return {"trainable_tokens_delta": ParameterSpec(len(spec.tokens), weight.shape[1])}  # type: ignore[union-attr, misc]

    def initialise(self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int) -> None:
        start_rows(own, self.base, spec)

    @classmethod
    def peft_keys(cls, module: nn.Module, spec: LayerSpec) -> dict[str, str]:
        return {part: f"token_adapter.{part}" for part in cls.shapes(module, spec)}

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to packed or batched rows.

        Args:
            x: `[..., D]`, the rows of the active route.

        Returns:
            `[..., V]`.

        Raises:
            ValueError: if no route says which adapter the rows belong to, or the route describes other rows.
        """
        y: Tensor = self.base(x)
        return self._routed(x, y) if self.group.adapters else y

    @never_compiled
    def _routed(self, x: Tensor, y: Tensor) -> Tensor:
        routed = self.routed(x)
        if routed is None:
            return y
        active, place, batch = routed
        names, lead = active.names, x.shape[:-1]

        def compute(owner: int, own: Sequence[Tensor]) -> Tensor:
            return own[1] if owner < 0 else self.with_rows(names[owner], *own)

        return by_adapter(row_groups(active, place, batch, lead), [x, y], lead, compute)

    def with_rows(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Returns the output of one adapter's rows, `y` with its own columns."""
        index = torch.tensor(self.specs[name].tokens, device=y.device)
        bias: Any = self.base.bias
        own = None if bias is None else bias[index].to(x.dtype)
        columns = F.linear(x, self.trained_rows(name).to(x.dtype), own)
        return y.index_copy(-1, index, columns.to(y.dtype))


def warn_of_dropped_biases(model: nn.Module, name: str) -> None:
    """Warns of layers with trained rows of an adapter whose bias PEFT leaves out."""
    for key, layer in model.named_modules():
        rows = isinstance(layer, TrainedRowsLinear) and name in layer.specs
        if rows and _has_numbers(layer.base.bias) and peft_drops_bias():
            warn_caller(
                f"adapter {name!r}: PEFT's unmerged forward of its folder leaves the bias of {key} out "
                "(huggingface/peft issue 3649); here, and merged in PEFT, the bias is kept"
            )


def _has_numbers(bias: Any) -> bool:
    """Whether there is a bias with a number other than zero, as far as this process can tell."""
    unknown = bias is None or bias.is_meta or isinstance(bias, FakeTensor)
    return not unknown and bool(bias.any())


def peft_drops_bias() -> bool:
    """Whether the installed PEFT leaves out the bias of a linear layer with trained rows."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    with torch.device("cpu"), torch.no_grad():
        base = nn.utils.skip_init(nn.Linear, 1, 1)  # draws no random numbers
        nn.init.ones_(base.weight)
        nn.init.ones_(base.bias)
        layer = TrainableTokensLayer(base, "probe", token_indices=[0])  # an argument that PEFT 0.19 needs
        layer.update_layer("probe", token_indices=[0])
        return bool(layer(torch.zeros(1, 1)) == 0)
