"""A frozen embedding with the low-rank parts and trained rows of many adapters, and a head with trained rows.

Letters: V tokens of the vocabulary, D width, R rank, N rows, T rows of x, n trained rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..adapters.kind import LayerSpec, ParameterSpec
from ..adapters.lora_config import init_kind
from ..adapters.trained_parts import TRAINED_ROWS
from ..frozen.quantized.families import is_library_layer, is_quantized
from ..never_compiled import never_compiled
from ..routing.row_groups import by_adapter, row_groups
from ..warn_caller import warn_caller
from .linear import is_plain_linear, is_transposed
from .over_module import OverModule, RowSource, plain_module


def positions(tokens: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where each id stands in `tokens` (any place if nowhere), and whether it does.

    Args:
        tokens: n tokens, each once.
        ids: `[...]` integers.
    """
    known, order = torch.tensor(tokens, dtype=ids.dtype, device=ids.device).sort()
    at = torch.searchsorted(known, ids.contiguous()).clamp(max=len(tokens) - 1)
    return order[at], known[at] == ids


def has_plain_rows(module: nn.Module) -> bool:
    """Whether a module, converted or not, has a weight with rows of numbers: not quantised, not sharded."""
    weight = plain_module(module)._parameters.get("weight")
    if weight is None or not weight.is_floating_point() or is_traceable_wrapper_subclass(weight):
        return False
    return not is_quantized(module) and not is_library_layer(module)


def start_rows(own: Mapping[str, nn.Parameter], base: nn.Module, spec: LayerSpec) -> None:
    """Fills new trained rows with the base's."""
    weight: Any = base.weight
    with torch.no_grad():
        for rows in own.values():
            rows.copy_(weight[list(spec.tokens)])


class MultiLoRAEmbedding(RowSource, OverModule):
    """`y = W[t] + scaling_i A_i[:, t]ᵀ B_iᵀ` for the tokens t of adapter i, as PEFT's `Embedding` has it.

    For an adapter that trains some of the rows, `y` is the adapter's own row if t is one of these tokens, as
    in PEFT's `TrainableTokensLayer`. Both are multiplied by the embedding's `embed_scale` if it has one
    (Gemma). PEFT does not apply `lora_dropout` to embeddings, nor does this layer.
    """

    served = ("lora", TRAINED_ROWS)

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        plain = plain_module(module)
        scaled = hasattr(plain, "embed_scale") or type(plain).forward is nn.Embedding.forward
        return isinstance(plain, nn.Embedding) and plain.max_norm is None and not plain.sparse and scaled

    @classmethod
    def shapes(cls, module: nn.Module, spec: LayerSpec) -> dict[str, ParameterSpec]:
        rows, width = plain_module(module).weight.shape  # type: ignore[union-attr, misc]
        if spec.kind == TRAINED_ROWS:
            delta = ParameterSpec(len(spec.tokens), width)
            return {} if spec.tied_to else {"trainable_tokens_delta": delta}
        return {
            "lora_embedding_A": ParameterSpec(spec.rank, rows),
            "lora_embedding_B": ParameterSpec(spec.rank, width, transposed=True),
        }

    def initialise(self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int) -> None:
        """Draws PEFT's initial values: A zeros and B normal, or both normal; rows start as the base's."""
        if spec.kind == TRAINED_ROWS:
            start_rows(own, self.base, spec)
            return
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = [] if init_kind(config) is not False else ["lora_embedding_A"]
        with torch.no_grad():
            for part in (*drawn, "lora_embedding_B"):
                values = torch.empty(own[part].shape, dtype=torch.float32, device="cpu")
                own[part].copy_(values.normal_(generator=generator))

    @classmethod
    def peft_keys(cls, module: nn.Module, spec: LayerSpec) -> dict[str, str]:
        return {part: f"token_adapter.{part}" if spec.tokens else part for part in cls.shapes(module, spec)}

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Looks tokens up.

        Args:
            ids: `[...]` integers, the rows of the active route.

        Returns:
            `[..., D]`.

        Raises:
            ValueError: if no route says which adapter the rows belong to, or the route describes other rows.
        """
        y: Tensor = self.base(ids, *args, **kwargs)
        return self._routed(ids, y) if self.group.adapters else y

    @never_compiled
    def _routed(self, ids: Tensor, y: Tensor) -> Tensor:
        routed = self.routed(ids.unsqueeze(-1))
        if routed is None:
            return y
        active, place, batch = routed
        names = active.names

        def compute(owner: int, own: Sequence[Tensor]) -> Tensor:
            return own[1] if owner < 0 else self._with_adapter(names[owner], *own)

        return by_adapter(row_groups(active, place, batch, ids.shape), [ids, y], ids.shape, compute)

    def _with_adapter(self, name: str, ids: Tensor, y: Tensor) -> Tensor:
        """Returns the rows of one adapter, `y` of the base's dtype."""
        spec, padding = self.specs[name], self.base.padding_idx
        if spec.kind == TRAINED_ROWS:
            at, found = positions(spec.tokens, ids)
            rows = self.trained_rows(name).to(self.frozen.dtype)
            none = spec.tokens.index(padding) if padding in spec.tokens else None
            own = F.embedding(at, rows, none, scale_grad_by_freq=self.base.scale_grad_by_freq)  # type: ignore[arg-type]
            return torch.where(found.unsqueeze(-1), self._scaled(own), y)
        parts = self.parameters_of(name)
        a, b = parts["lora_embedding_A"], parts["lora_embedding_B"]
        after_a = F.embedding(ids, a.t(), padding, scale_grad_by_freq=self.base.scale_grad_by_freq)  # type: ignore[arg-type]
        return (y + self._scaled((after_a @ b.t()) * spec.scaling)).to(y.dtype)

    def _scaled(self, rows: Tensor) -> Tensor:
        scale = getattr(self.base, "embed_scale", None)
        if scale is None:
            return rows
        if not isinstance(scale, Tensor):
            scale = torch.tensor(scale, dtype=self.frozen.dtype, device=rows.device)
        return rows * scale.to(rows.dtype)


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
