"""Causal attention over packed rows: sequences lie one after the other and never see each other.

`register_packed_attention` registers it with `transformers.AttentionInterface` when a model is loaded.

Shapes: T packed rows, H query heads, K key and value heads, N sequences of equal length L, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED_ATTENTION = "mlora_packed"

# Models pass these for other attention functions; they add nothing to what packed rows say.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)


@dataclass(eq=False)
class PackedSequences:
    """Where the sequences of packed rows begin and end; made on the host, once per micro-batch."""

    lengths: tuple[int, ...]  # rows of each sequence, in order
    cu_seq_lens: Tensor  # `[N + 1]` int32 on the rows' device, running sums of `lengths`
    # `(sequences, length)` of neighbouring sequences of equal length: one attention call each
    runs: list[tuple[int, int]] = field(init=False)
    # the sliding window that each layer asked for, by layer index
    windows: dict[int | None, int | None] = field(default_factory=dict, init=False)
    _bands: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.runs = [(len(list(group)), length) for length, group in groupby(self.lengths)]

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device | str) -> PackedSequences:
        ends = torch.tensor((0, *lengths), dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        return cls(lengths, ends.to(device))

    def seen(self, length: int, window: int | None) -> Tensor:
        """Returns which keys a query sees: `[L, L]` bool, `0 <= query - key < window`.

        It is a view of one mask that all layers share, since autograd keeps it.
        """
        longest = max(self.lengths)
        if (window, torch.bool) not in self._bands:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=self.cu_seq_lens.device)
            self._bands[window, torch.bool] = ones.tril() if window is None else ones.tril().triu(1 - window)
        return self._bands[window, torch.bool][:length, :length]

    def band(self, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns SDPA's additive mask `[L, L]`: 0 where a query sees a key, else minus infinity.

        From a bool mask SDPA would make such a mask for each layer, and autograd would keep them all.
        """
        if (window, dtype) not in self._bands:
            seen = self.seen(max(self.lengths), window)
            self._bands[window, dtype] = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
        return self._bands[window, dtype][:length, :length]


def register_packed_attention() -> None:
    """Registers `mlora_packed` as an attention function of Transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_sequences: PackedSequences | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Returns causal self-attention within each packed sequence, `[1, T, H, E']`, and None for the weights.

    `softmax(softcap · tanh(scaling · Q Kᵀ / softcap)) V` per sequence, masked to the last `sliding_window`
    keys, the query's own included. A sink adds one column without a value to the softmax. ValueError if the
    layer asks for anything else, such as a mask, dropout or later tokens.

    Args:
        query: `[1, H, T, E]`.
        key: `[1, K, T, E]`, H a multiple of K.
        value: `[1, K, T, E']`.
        scaling: of the scores; default `1 / sqrt(E)`.
        softcap: bound of the scores, or None.
        s_aux: `[H]`, the score of each head's sink, or None.
    """
    if packed_sequences is None:
        raise ValueError(
            f"{type(module).__name__}: the model does not pass packed_sequences on to its attention layers"
        )
    _refuse(module, query, key, attention_mask, dropout, is_causal, others)
    packed_sequences.windows[getattr(module, "layer_idx", None)] = sliding_window
    if softcap is None and s_aux is None and _flash_serves(query, value):
        return _varlen(query, key, value, packed_sequences, scaling, sliding_window), None
    rows = [query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)]
    runs = packed_sequences.runs
    sizes = [count * length for count, length in runs]
    pieces = [rows] if len(runs) == 1 else zip(*(x.split(sizes, dim=1) for x in rows), strict=True)
    outputs = []
    for (count, length), piece in zip(runs, pieces, strict=True):
        q, k, v = [x.reshape(count, length, *x.shape[2:]).transpose(1, 2) for x in piece]
        if softcap is None and s_aux is None:
            windowed = sliding_window is not None and sliding_window < length
            band = packed_sequences.band(length, sliding_window, q.dtype) if windowed else None
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=band,
                is_causal=band is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            seen = packed_sequences.seen(length, sliding_window)
            out = _explicit(q, k, v, seen, scaling, softcap, s_aux)
        outputs.append(out.transpose(1, 2).reshape(1, count * length, *out.shape[1::2]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    name = type(module).__name__
    if is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False):
        raise ValueError(f"{name}: attends to later tokens; packed rows need causal attention")
    if attention_mask is not None or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{name}: uses a mask, a batch or cached keys, which packed attention does not support"
        )
    if dropout:
        raise ValueError(f"{name}: expected attention dropout 0, got {dropout}")
    for key_, value in others.items():
        if key_ not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise ValueError(f"{name}: uses {key_!r}, which packed attention does not support")


def _flash_serves(query: Tensor, value: Tensor) -> bool:
    low = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and low and query.shape[-1] == value.shape[-1] <= 256


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: PackedSequences,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Runs PyTorch's variable-length flash attention; its window counts only the keys before the query."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    longest, ends = max(sequences.lengths), sequences.cu_seq_lens
    how: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if _groups_heads(varlen_attn):
            how["enable_gqa"] = True
        else:  # torch 2.11 asks for as many heads of keys as of queries
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    window_size = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=window_size, **how)
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


@cache
def _groups_heads(attend: Callable[..., Any]) -> bool:
    return "enable_gqa" in signature(attend).parameters


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns `[N, H, L, E']` for soft caps and sinks, which SDPA lacks; scores in memory, fp32 softmax."""
    groups = (q.shape[1] // k.shape[1], q.shape[2])
    q = q.unflatten(1, (k.shape[1], groups[0]))
    scores = (q @ k.unsqueeze(2).transpose(-1, -2)).float() * (scaling or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = torch.where(seen, scores, -torch.inf)  # adding a mask would turn overflown scores into NaN
    if sinks is not None:
        column = sinks.float().view(k.shape[1], groups[0], 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1).to(v.dtype)[..., : groups[1]]
    return (weights @ v.unsqueeze(2)).flatten(1, 2)
