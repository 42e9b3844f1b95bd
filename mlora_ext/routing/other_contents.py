"""Changes the contents of some samples in a forward pass's arguments; tokens stay valid."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]
"""Returns a tensor's replacement; if it returns the tensor itself, a copy replaces it."""


def copied(argument: Any, change: Change) -> Any:
    """Returns a changed copy of a tensor, or of an object such as a cache; one pass may write to it."""
    if isinstance(argument, Tensor):
        return _fresh(argument, change)
    # `deepcopy` cannot copy tensors that belong to an autograd graph.
    inside = {id(t): _fresh(t, change) for t in tensors_in(argument)}
    return copy.deepcopy(argument, inside)


def _fresh(tensor: Tensor, change: Change) -> Tensor:
    other = change(tensor)
    return tensor.detach().clone() if other is tensor else other.detach()


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yields the tensors inside an object: in its attributes, and in lists, tuples and dicts."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in (*items, *getattr(value, "__dict__", {}).values()):
        yield from tensors_in(item, seen)


def other_contents(tensor: Tensor, samples: Tensor, special: Tensor) -> Tensor:
    """Returns `tensor [B, ...]` with other contents where `samples [B]` (bool) is True.

    Tokens in `special` (int64) stay, unless a sample has no others.
    """
    samples = samples.to(tensor.device)
    if tensor.is_floating_point():
        return _with_noise(tensor, samples)
    other = ~tensor if tensor.dtype == torch.bool else _other_tokens(tensor, special.to(tensor.device))
    return torch.where(samples.view(-1, *[1] * (tensor.dim() - 1)), other, tensor)


def _with_noise(tensor: Tensor, samples: Tensor) -> Tensor:
    """Adds noise to these samples; of rank 1 over the last two dimensions, as a cache may be large."""
    other = tensor.detach().clone()
    if not tensor.numel():
        return other
    generator = torch.Generator("cpu").manual_seed(0)
    last = [torch.randn(size, generator=generator, device="cpu") for size in tensor.shape[1:][-2:]]
    noise = torch.outer(*last) if len(last) == 2 else last[0] if last else torch.ones((), device="cpu")
    low, high = tensor.detach().aminmax()
    size = torch.maximum(low.abs(), high.abs()).clamp(1e-3, 1e3) / 4
    other[samples] += size * noise.to(tensor)
    return other


def _other_tokens(tokens: Tensor, special: Tensor) -> Tensor:
    """Replaces each token by another one of this tensor; special ones stay if a sample has others."""
    usual = ~torch.isin(tokens, special)
    inner = tuple(range(1, tokens.dim()))
    usual |= ~usual.any(inner, keepdim=True) if inner else ~usual
    known = tokens[usual].unique()
    if known.numel() < 2:
        return torch.where(usual, torch.where(tokens > 0, tokens - 1, tokens + 1), tokens)
    following = known[(torch.searchsorted(known, tokens.clamp(known[0], known[-1])) + 1) % known.numel()]
    return torch.where(usual, following, tokens)


def special_tokens(module: nn.Module, kinds: tuple[str, ...] = ("",)) -> Tensor:
    """Returns tokens that Transformers' configs name: a model may count them, or replace them by images.

    `kinds`: how the names begin that are wanted.
    """
    found: set[int] = set()

    def collect(values: Mapping[Any, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                collect(value)
            elif str(key).startswith(kinds) and str(key).endswith(("token_id", "token_index", "token_ids")):
                found.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))

    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    for config in {id(config): config for config in configs}.values():
        if callable(getattr(config, "to_dict", None)):
            collect(config.to_dict())
    return torch.tensor(sorted(found), dtype=torch.int64, device="cpu")
