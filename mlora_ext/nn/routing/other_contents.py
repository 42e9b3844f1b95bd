"""Arguments of a forward pass with other contents in some samples: valid ones, where they hold tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]
"""What to put in a tensor's place; the tensor itself: a copy of it."""


def copied(argument: Any, change: Change) -> Any:
    """A tensor, or an object such as a cache, for one pass, which may write to it."""
    if isinstance(argument, Tensor):
        return _fresh(argument, change)
    # A tensor of a graph refuses to be copied by `deepcopy`.
    inside = {id(t): _fresh(t, change) for t in tensors_in(argument)}
    return copy.deepcopy(argument, inside)


def _fresh(tensor: Tensor, change: Change) -> Tensor:
    other = change(tensor)
    return tensor.detach().clone() if other is tensor else other.detach()


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors inside of an object: its attributes, and items of lists, tuples and dicts."""
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
    """The tensor with other contents in these samples.

    Args:
        tensor: `[B, ...]`.
        samples: `[B]` bool.
        special: int64, tokens that stay, where a sample has others.
    """
    samples = samples.to(tensor.device)
    if tensor.is_floating_point():
        return _with_noise(tensor, samples)
    other = ~tensor if tensor.dtype == torch.bool else _other_tokens(tensor, special.to(tensor.device))
    return torch.where(samples.view(-1, *[1] * (tensor.dim() - 1)), other, tensor)


def _with_noise(tensor: Tensor, samples: Tensor) -> Tensor:
    """Noise of rank 1 over the last two dimensions: a cache may be large."""
    other = tensor.detach().clone()
    if not tensor.numel():
        return other
    generator = torch.Generator().manual_seed(0)
    last = [torch.randn(size, generator=generator, device="cpu") for size in tensor.shape[1:][-2:]]
    noise = torch.outer(*last) if len(last) == 2 else last[0] if last else torch.ones((), device="cpu")
    low, high = tensor.detach().aminmax()
    size = torch.maximum(low.abs(), high.abs()).clamp(1e-3, 1e3) / 4
    other[samples] += size * noise.to(tensor)
    return other


def _other_tokens(tokens: Tensor, special: Tensor) -> Tensor:
    """Each token becomes another one of this tensor; special ones stay, where a sample has others."""
    usual = ~torch.isin(tokens, special)
    inner = tuple(range(1, tokens.dim()))
    usual |= ~usual.any(inner, keepdim=True) if inner else ~usual
    known = tokens[usual].unique()
    if known.numel() < 2:
        return torch.where(usual, torch.where(tokens > 0, tokens - 1, tokens + 1), tokens)
    following = known[(torch.searchsorted(known, tokens.clamp(known[0], known[-1])) + 1) % known.numel()]
    return torch.where(usual, following, tokens)


def special_tokens(module: nn.Module, kinds: tuple[str, ...] = ("",)) -> Tensor:
    """Tokens that configurations of Transformers name: a model may count them, or replace them by images.

    Args:
        module: whose parts have the configurations.
        kinds: only those whose names begin so.
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
    return torch.tensor(sorted(found), dtype=torch.int64)
