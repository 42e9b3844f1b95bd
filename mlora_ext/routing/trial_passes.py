"""Trial passes: the frozen base runs on a batch and on changed copies of it, and leaves no trace.

The inputs that layers see in them tell which rows belong to which sample: see `samples`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..out_of_memory import is_out_of_memory
from .call_kind import Call
from .other_contents import Change, copied, other_contents, special_tokens, tensors_in
from .undisturbed import undisturbed

COLUMNS = 8
"""Number of columns of x by which rows are compared."""
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What a model may raise for a batch that it was not made for; also where memory runs out."""


@dataclass(eq=False)
class Observer:
    """Records the inputs that layers see in one pass: shapes, and some columns of every row."""

    seen: dict[str, list[tuple[torch.Size, Tensor]]] = field(default_factory=dict)

    def see(self, layer: str, x: Tensor, y: Tensor) -> Tensor:
        """Records one call of a layer, and returns its output."""
        rows = x.detach().reshape(-1, x.shape[-1])
        columns = rows[:, :: max(1, x.shape[-1] // COLUMNS)][:, :COLUMNS]
        if columns.dtype == torch.float32 and _rounds_to_16_bits(x.device.type):
            columns = columns.bfloat16()
        self.seen.setdefault(layer, []).append((x.shape, columns.to("cpu", copy=True)))
        return y


def _rounds_to_16_bits(device: str) -> bool:
    """Whether fp32 products are less exact, because of autocast or TF32."""
    return torch.is_autocast_enabled(device) or torch.get_float32_matmul_precision() != "highest"


class TrialPasses:
    """The passes with one batch; each runs when it is first asked for.

    They change the contents of samples, and states given with them: caches, and numbers in lists and dicts.

    Args:
        module: whose forward is called; the model, or its encoder.
        call: positional and keyword arguments of the forward pass.
        contents: the tensors among the arguments that hold the samples, `[batch, ...]`.
        others: tensors that have as many entries but not one per sample.
        patches: tensors with several adjacent rows for each sample, see `patches_of`.
        observed: a context in which layers call `Observer.see` and add no adapter.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Call,
        contents: Sequence[Tensor],
        others: Sequence[Tensor],
        patches: Sequence[Tensor],
        observed: Callable[[], AbstractContextManager[Observer]],
    ) -> None:
        self.batch = contents[0].shape[0]
        self._module, self._call, self._observed = module, call, observed
        self._patches = {id(tensor) for tensor in patches}
        left_out = {id(tensor) for tensor in others} | self._patches
        counting = [t for t in tensors_in(call) if t.dim() > 0 and t.shape[0] == self.batch]
        self._counting = {id(t) for t in counting} - left_out
        self._contents = {id(t) for t in contents}
        self._states = {id(t) for t in _states(call, self.batch)} & self._counting
        self._special = special_tokens(module)

    @cached_property
    def changed(self) -> list[Observer]:
        """The batch itself, then one pass per binary digit, with other contents in the samples that have it.

        Raises `FAILURES` if the model does.
        """
        try:
            return self._changed(_as_it_is)
        except FAILURES as error:
            if is_out_of_memory(error) or not self._states:
                raise
            self._states = set()  # states such as probabilities cannot take every value
            return self._changed(_as_it_is)

    @cached_property
    def rolled(self) -> Observer:
        """The pass with all samples moved on by one; an empty observer if the model fails."""
        return next(iter(_unless_it_fails(lambda: [self._observe(self._moved_on)])), Observer())

    @cached_property
    def rolled_and_changed(self) -> list[Observer]:
        """As `changed`, with all samples moved on by one; empty if the model fails."""
        return _unless_it_fails(lambda: self._changed(self._moved_on))

    @cached_property
    def grown(self) -> list[tuple[int, Observer]]:
        """Per binary digit: how many samples have it, and a pass with these twice; empty if one fails."""
        groups = list(self._of_each_digit())
        passes = _unless_it_fails(lambda: [self._observe(self._twice(samples)) for samples in groups])
        return [(int(samples.sum()), seen) for samples, seen in zip(groups, passes, strict=False)]

    def _of_each_digit(self) -> Iterator[Tensor]:
        """Yields `[batch]` bool for each binary digit: the samples b whose b + 1 has it."""
        numbers = torch.arange(1, self.batch + 1, device="cpu")
        for digit in range(self.batch.bit_length()):
            yield (numbers >> digit & 1).bool()

    def _moved_on(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._patches:
            return tensor.roll(len(tensor) // self.batch, 0)
        return tensor.roll(1, 0) if id(tensor) in self._counting else tensor

    def _twice(self, samples: Tensor) -> Change:
        def change(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._counting | self._patches:
                return tensor
            rows = samples.to(tensor.device).repeat_interleave(len(tensor) // self.batch)
            return torch.cat([tensor, tensor[rows]])

        return change

    def _changed(self, order: Change) -> list[Observer]:
        changing = self._contents | self._states

        def with_others_in(samples: Tensor) -> Change:
            def change(tensor: Tensor) -> Tensor:
                given = order(tensor)
                if id(tensor) in self._patches and tensor.is_floating_point():
                    by_sample = given.unflatten(0, (self.batch, -1))
                    return other_contents(by_sample, samples, self._special).flatten(0, 1)
                return other_contents(given, samples, self._special) if id(tensor) in changing else given

            return change

        return [self._observe(change) for change in (order, *map(with_others_in, self._of_each_digit()))]

    def _observe(self, change: Change) -> Observer:
        with undisturbed(self._module), self._observed() as observer:
            args, kwargs = pytree.tree_map(lambda leaf: copied(leaf, change), self._call, is_leaf=_is_leaf)
            self._module.forward(*args, **kwargs)
        return observer


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _states(call: Call, batch: int) -> Iterator[Tensor]:
    """Yields float tensors `[batch, ...]` that come with the samples, in an object or in a list.

    In a list, tensors with a second dimension of the same size are skipped: either may count samples.
    """
    args, kwargs = call
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            continue
        listed = isinstance(argument, list | tuple | Mapping)
        for tensor in tensors_in(argument):
            known = tensor.dim() > 1 and not (listed and tensor.shape[1] == batch)
            if known and tensor.is_floating_point():
                yield tensor


def _unless_it_fails(passes: Callable[[], list[Observer]]) -> list[Observer]:
    """Returns these passes; an empty list if the model refuses such a batch."""
    try:
        return passes()
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        return []


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, tuple | list | dict)
