"""Trial passes: the frozen base runs on a batch and on copies of it with other contents, and leaves no trace.

What layers see in them tells whose rows are whose, see `samples`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .call_kind import Call

COLUMNS = 8
"""Columns of x by which rows are compared."""
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What a model may raise for a batch that it was not made for."""


@dataclass(eq=False)
class Observer:
    """What layers see in one pass: shapes, and some columns of every row."""

    seen: dict[str, list[tuple[torch.Size, Tensor]]] = field(default_factory=dict)

    def see(self, layer: str, x: Tensor) -> None:
        """Remember one call of a layer."""
        rows = x.detach().reshape(-1, x.shape[-1])
        columns = rows[:, :: max(1, x.shape[-1] // COLUMNS)][:, :COLUMNS]
        self.seen.setdefault(layer, []).append((x.shape, columns.clone()))


class TrialPasses:
    """The passes with one batch; each is made when it is first asked for.

    Args:
        module: whose forward is called; the model, or its encoder.
        call: positional and keyword arguments of the forward pass.
        contents: those tensors among the arguments that hold what samples are made of, `[batch, ...]`.
        others: those that have as many entries but do not count samples.
        observed: a context in which layers call `Observer.see` and add no adapter.
        caches: tensors inside of arguments that hold what samples are made of, too.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        contents: Sequence[Tensor],
        others: Sequence[Tensor],
        observed: Callable[[], AbstractContextManager[Observer]],
        caches: Sequence[Tensor] = (),
    ) -> None:
        self.batch = contents[0].shape[0]
        self._module, self._call, self._observed, self._others = module, call, observed, others
        self._leaves = pytree.tree_leaves(call, is_leaf=_is_leaf)
        self._contents, self._caches = [*contents, *caches], caches
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        left_out = {id(other) for other in others}
        self._counting = [t for t in [*tensors, *caches] if self._counts(t) and id(t) not in left_out]
        self._special = special_tokens(module)

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.batch

    @cached_property
    def with_caches(self) -> TrialPasses | None:
        """Passes in which samples have other contents in caches, too; None if there are none.

        Where a source has one token, what a decoder reads of it follows from the cache alone.
        """
        objects = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor | nn.Module)]
        inside = {id(t): t for leaf in objects for t in _tensors_in(leaf, set())}
        caches = [t for t in inside.values() if t.is_floating_point() and t.dim() > 1 and self._counts(t)]
        if not caches or self._caches:
            return None
        contents = self._contents
        return TrialPasses(self._module, self._call, contents, self._others, self._observed, caches)

    @cached_property
    def changed(self) -> list[Observer]:
        """The batch itself, then for each binary digit: with other contents in the samples that have it.

        Raises:
            FAILURES: if the model does.
        """
        return self._changed({})

    @cached_property
    def rolled(self) -> Observer:
        """With all samples moved on by one."""
        return next(iter(_unless_it_fails(lambda: [self._observe(self._moved_on)])), Observer())

    @cached_property
    def rolled_and_changed(self) -> list[Observer]:
        """As `changed`, with all samples moved on by one; empty if the model fails."""
        return _unless_it_fails(lambda: self._changed(self._moved_on))

    @cached_property
    def grown(self) -> Observer:
        """With the last sample once more."""
        one_more = {id(t): torch.cat([t, t[-1:]]) for t in self._counting}
        return next(iter(_unless_it_fails(lambda: [self._observe(one_more)])), Observer())

    @property
    def _moved_on(self) -> dict[int, Tensor]:
        return {id(t): t.roll(1, 0) for t in self._counting}

    def _changed(self, given: Mapping[int, Tensor]) -> list[Observer]:
        passes = [self._observe(given)]
        for bit in range(self.batch.bit_length()):
            samples = torch.tensor([(b + 1) >> bit & 1 for b in range(self.batch)], dtype=torch.bool)
            changed = {
                id(t): _other_contents(given.get(id(t), t), samples, self._special) for t in self._contents
            }
            passes.append(self._observe({**given, **changed}))
        return passes

    def _observe(self, replaced: Mapping[int, Tensor]) -> Observer:
        """A pass in which tensors, by their ids, have others in their place."""
        with _undisturbed(self._module), self._observed() as observer:
            args, kwargs = pytree.tree_map(lambda leaf: _copied(leaf, replaced), self._call, is_leaf=_is_leaf)
            self._module.forward(*args, **kwargs)
        return observer


def _unless_it_fails(passes: Callable[[], list[Observer]]) -> list[Observer]:
    """These passes; empty if the model refuses such a batch."""
    try:
        return passes()
    except torch.OutOfMemoryError:
        raise
    except FAILURES:
        return []


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """No gradients, no compilation; buffers and random numbers are as before afterwards."""
    import numpy as np

    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    others = random.getstate(), np.random.get_state()  # SpecAugment draws from NumPy's
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])
        with torch.no_grad():
            for part, name, buffer, content in buffers:
                part._buffers[name] = buffer
                if not _overlaps(buffer):  # as an expanded one, which nothing can write to
                    buffer.copy_(content)


def _overlaps(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, tuple | list | dict)


def _copied(leaf: Any, replaced: Mapping[int, Tensor]) -> Any:
    """An argument for one pass, which may write to it, as to a cache."""
    if isinstance(leaf, Tensor):
        return replaced.get(id(leaf), leaf).detach().clone()
    # A tensor of a graph refuses to be copied by `deepcopy`.
    inside = {id(t): replaced.get(id(t), t).detach().clone() for t in _tensors_in(leaf, set())}
    return copy.deepcopy(leaf, inside)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors inside of an object: its attributes, and items of lists, tuples and dicts."""
    if id(value) in seen or isinstance(value, nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for item in (*items, *getattr(value, "__dict__", {}).values()):
        yield from _tensors_in(item, seen)


def _other_contents(tensor: Tensor, samples: Tensor, special: Tensor) -> Tensor:
    """The tensor with other contents in these samples (`[B]` bool): valid ones, where it holds tokens."""
    samples = samples.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape[1:], generator=torch.Generator().manual_seed(0))
        size = tensor.abs().max().clamp(1e-3, 1e3) / 4
        other = tensor + size * noise.to(tensor)
    elif tensor.dtype == torch.bool:
        other = ~tensor
    else:
        other = _other_tokens(tensor, special.to(tensor.device))
    return torch.where(samples, other, tensor)


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
