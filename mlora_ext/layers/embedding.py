"""A frozen embedding with the low-rank parts and trained rows of many adapters.

Letters: V tokens of the vocabulary, D width, R rank, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.kind import LayerSpec, ParameterSpec
from ..adapters.lora_config import init_kind
from ..adapters.trained_parts import TRAINED_ROWS
from ..never_compiled import never_compiled
from ..routing.row_groups import by_adapter, row_groups
from .over_module import OverModule, RowSource, plain_module
from .trained_rows import positions, start_rows


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
