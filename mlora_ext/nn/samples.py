"""Where the samples of a batch lie in a layer's input: found by experiment, once per kind of input.

A layer sees `[..., D]`, and the shape does not say which rows are whose: `[B, S, D]` and `[S, B, D]` look
alike where B = S, and rows may be flattened, interleaved, selected, or shared by all samples. So before the
first mixed batch the frozen base runs a few times, without gradients, on that batch and on copies of it in
which some samples have other contents. A row that changes belongs to one of the samples that changed. Sample
b changes in the passes that the binary digits of b + 1 name: `ceil(log2(B + 1))` passes tell whose a row is.
Two more passes see what follows the order of the samples, and what their number.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .call_kind import Call

COLUMNS = 8
"""Columns of x by which rows are compared."""
CLEAN, CHANGED, CHANGED_16_BITS = 4, 64, 16
"""A row is clean if it moved by at most `CLEAN` epsilons of each column's largest number, changed if a column
moved by more than `CHANGED` of them. Between the two it is left out: a mixture of experts rounds rows of
other samples differently when its groups grow."""


class SampleDim(NamedTuple):
    """Where samples lie in a layer's input.

    Attributes:
        dim: the dimension that counts them.
        order: `single`: one entry per sample; `blocks`: several, a sample's own side by side; `interleaved`:
            several, all samples' first entries before their second ones.
        ratios: a sample's entries in this dimension, divided by each of its sizes, see `sizes_of`.
    """

    dim: int
    order: Literal["single", "blocks", "interleaved"]
    ratios: tuple[float, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the input, flattened, has its rows in the order of the samples."""
        return self.dim == 0 and self.order != "interleaved"

    def serves(self, shape: Sequence[int], batch: int, sizes: Sequence[float]) -> bool:
        """Whether an input of this shape holds a batch of this size so: entries follow one of the sizes."""
        if self.order == "single":
            return shape[self.dim] == batch
        entries, rest = divmod(shape[self.dim], batch)
        follows = [ratio * size for ratio, size in zip(self.ratios, sizes, strict=True)]
        return not rest and any(math.isclose(entries, number) for number in follows)

    def owners(self, shape: Sequence[int], batch: int) -> Tensor:
        """`[rows]` int64: the sample of each row."""
        index = torch.arange(shape[self.dim])
        index = index % batch if self.order == "interleaved" else index // (shape[self.dim] // batch)
        ones = [1] * (len(shape) - 2 - self.dim)
        return index.view(-1, *ones).expand(shape[:-1]).flatten()

    def samples_first(self, x: Tensor, batch: int) -> Tensor:
        """x as `[batch, ..., D]`; a view."""
        if self.is_plain:
            return x
        if self.order == "interleaved":
            return x.unflatten(self.dim, (-1, batch)).movedim(self.dim + 1, 0)
        return x.unflatten(self.dim, (batch, -1)).movedim(self.dim, 0)

    def as_before(self, y: Tensor) -> Tensor:
        """Undoes `samples_first`, for a result with the same leading dimensions; contiguous."""
        if self.is_plain:
            return y
        y = y.movedim(0, self.dim + (self.order == "interleaved"))
        return y.flatten(self.dim, self.dim + 1).contiguous()


Places = Mapping[tuple[str, int], SampleDim | str]
"""By layer name and number of dimensions of its input: where samples lie, or why that cannot be served."""
EVERY = ("", 0)
"""Stands for all layers."""


@dataclass(eq=False)
class Observer:
    """What layers see in one pass: shapes, and some columns of every row."""

    seen: dict[str, list[tuple[torch.Size, Tensor]]] = field(default_factory=dict)

    def see(self, layer: str, x: Tensor) -> None:
        """Remember one call of a layer."""
        rows = x.detach().reshape(-1, x.shape[-1])
        columns = rows[:, :: max(1, x.shape[-1] // COLUMNS)][:, :COLUMNS]
        self.seen.setdefault(layer, []).append((x.shape, columns.clone()))


def find_places(
    module: nn.Module,
    call: Call,
    contents: Sequence[Tensor],
    others: Sequence[Tensor],
    sizes: Sequence[float],
    observed: Callable[[], Any],
) -> Places:
    """Find where samples lie in the inputs of all layers that a forward pass calls.

    Args:
        module: whose forward is called; the model, or its encoder.
        call: positional and keyword arguments of the forward pass.
        contents: those tensors among the arguments that hold what samples are made of, `[batch, ...]`.
        others: those that have as many entries but do not count samples.
        sizes: of each sample, see `sizes_of`.
        observed: a context in which layers call `Observer.see` and add no adapter.

    Returns:
        By layer and dimensions; where the module fails in a pass, the reason by `EVERY`.
    """
    leaves = pytree.tree_leaves(call, is_leaf=_is_leaf)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    batch, special = contents[0].shape[0], special_tokens(module)
    counting = [t for t in tensors if t.shape[0] == batch and not any(t is other for other in others)]

    def observe(replaced: Mapping[int, Tensor]) -> Observer:
        with _undisturbed(module), observed() as observer:
            args, kwargs = pytree.tree_map(lambda leaf: _copied(leaf, replaced), call, is_leaf=_is_leaf)
            module.forward(*args, **kwargs)
        return observer

    def changed(samples: Tensor) -> Mapping[int, Tensor]:
        return {id(t): _other_contents(t, samples, special) for t in contents}

    passes = []
    try:
        for bit in range(-1, batch.bit_length()):  # none of the samples, then those of each binary digit
            samples = torch.tensor([bit >= 0 and (b + 1) >> bit & 1 for b in range(batch)], dtype=torch.bool)
            passes.append(observe(changed(samples) if bit >= 0 else {}))
    except torch.OutOfMemoryError:
        raise
    except _FAILURES as error:
        return {EVERY: f"in a trial pass the model fails ({type(error).__name__}: {error})"}
    plain = passes[0]
    rolled = _reshaped(observe, counting, lambda t: t.roll(1, 0))
    grown: list[Observer] = []
    places: dict[tuple[str, int], SampleDim | str] = {}
    for layer, dims in {
        (layer, len(shape)): None for layer, calls in plain.seen.items() for shape, _ in calls
    }:
        before = _calls(plain, layer, dims)
        found = _by_changes([_calls(observer, layer, dims) for observer in passes], batch)
        if isinstance(found, list):  # several, or rows that changed with no sample
            grown = grown or [_reshaped(observe, counting, lambda t: torch.cat([t, t[-1:]]))]
            found = _by_growth(before, _calls(grown[0], layer, dims), batch, found)
        if isinstance(found, SampleDim) and _follows_values(
            found, before, _calls(rolled, layer, dims), batch
        ):
            found = "the order of its rows depends on their values"
        if isinstance(found, SampleDim):
            found = _with_ratios(found, [shape for shape, _ in before], batch, sizes)
        places[layer, dims] = found
    return places


def _with_ratios(
    place: SampleDim, shapes: Sequence[torch.Size], batch: int, sizes: Sequence[float]
) -> SampleDim | str:
    """The place as it can be told from other batches; a reason, where the calls of a layer differ in it."""
    entries = {shape[place.dim] // batch for shape in shapes}
    if place.order != "single" and len(entries) > 1:
        return "its calls see other numbers of rows of each sample"
    number = entries.pop()
    return place._replace(ratios=tuple(number / size if size else 0.0 for size in sizes))


_Observe = Callable[[Mapping[int, Tensor]], Observer]
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What a model may raise for a batch that it was not made for."""


def _reshaped(observe: _Observe, counting: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Observer:
    """A pass in which all tensors of samples are changed; one that saw nothing if the model refuses that."""
    try:
        return observe({id(tensor): change(tensor) for tensor in counting})
    except torch.OutOfMemoryError:
        raise
    except _FAILURES:
        return Observer()


Calls = Sequence[tuple[torch.Size, Tensor]]
"""Shape and compared columns of each input that a layer saw in one pass."""


def _by_changes(passes: Sequence[Calls], batch: int) -> SampleDim | str | list[SampleDim]:
    """The place that agrees with which rows changed in which pass; several, if that does not tell."""
    if any([shape for shape, _ in calls] != [shape for shape, _ in passes[0]] for calls in passes):
        return "its rows are a selection that depends on their values, as inside a mixture of experts"
    possible: list[SampleDim] | None = None
    changed, sure = False, True
    for shape, owners in _owners(passes):
        agree = [
            place
            for place in _candidates(shape, batch)
            if bool(((owners < 0) | (owners == place.owners(shape, batch))).all())
        ]
        possible = agree if possible is None else [place for place in possible if place in agree]
        changed = changed or bool((owners >= 0).any())
        sure = sure and (bool((owners >= 0).all()) or _each_is_known(agree, owners, batch))
    if changed and not possible:
        return "its rows are not ordered by sample, or several samples share them"
    return possible[0] if sure and possible and len(possible) == 1 else possible or []


def _each_is_known(agree: Sequence[SampleDim], owners: Tensor, batch: int) -> bool:
    """Whether a dimension has one entry of each sample, and rows in each that only this sample changes."""
    if len(agree) != 1 or agree[0].order != "single":
        return False
    return bool(torch.bincount(owners[owners >= 0], minlength=batch).all())


def _owners(passes: Sequence[Calls]) -> Iterator[tuple[torch.Size, Tensor]]:
    """Shape of each call, and `[rows]` int64: the sample that each row changed with, or -1 if unknown."""
    for index, (shape, rows) in enumerate(passes[0]):
        codes, unknown = torch.zeros(2, rows.shape[0], dtype=torch.int64)
        epsilon = torch.finfo(rows.dtype).eps
        scale = rows.double().abs().amax(0) if rows.numel() else 1.0
        for bit, calls in enumerate(passes[1:]):
            difference = (calls[index][1].double() - rows.double()).abs()
            moved = torch.where(difference > 0, difference / scale, 0.0).amax(1).cpu()
            changed = moved > _noticed(rows) * epsilon
            codes |= changed.long() << bit
            unknown |= ((moved > CLEAN * epsilon) & ~changed).long()
        yield shape, torch.where(unknown == 1, 0, codes) - 1


def _noticed(rows: Tensor) -> int:
    """Epsilons by which a row must differ to be another one."""
    return CHANGED if rows.element_size() > 2 else CHANGED_16_BITS


def _follows_values(place: SampleDim, before: Calls, after: Calls, batch: int) -> bool:
    """Whether samples came in another order than the next one, when all moved on by one."""
    for (shape, rows), (shape_after, rows_after) in zip(before, after, strict=False):
        if shape != shape_after or not rows.numel():
            continue
        limit = _noticed(rows) * torch.finfo(rows.dtype).eps * float(rows.abs().max())
        by_sample = place.owners(shape, batch).argsort(stable=True).view(batch, -1).to(rows.device)
        each, each_after = (seen[by_sample].flatten(1) for seen in (rows, rows_after))
        if bool((each_after - each.roll(1, 0)).abs().max() <= limit):
            continue
        alike = [((each - sample).abs().amax(1) <= limit) for sample in each_after]
        if all(bool(one.any()) for one in alike):
            return True
    return False


def _by_growth(before: Calls, after: Calls, batch: int, possible: Sequence[SampleDim]) -> SampleDim | str:
    """Of these places, the one whose dimension alone grows with the samples, by what each has."""
    dims = {
        dim
        for (small, _), (large, _) in zip(before, after, strict=False)
        for dim in range(len(small) - 1)
        if small[dim] != large[dim]
    }
    left = [place for place in possible if dims == {place.dim}]
    grows = all(
        large[dim] * batch == small[dim] * (batch + 1)
        for (small, _), (large, _) in zip(before, after, strict=False)
        for dim in dims
    )
    if len(left) == 1 and grows and len(before) == len(after):
        return left[0]
    return "its rows do not follow from the samples, as positions that all samples share"


def _calls(observer: Observer, layer: str, dims: int) -> Calls:
    return [call for call in observer.seen.get(layer, []) if len(call[0]) == dims]


def _candidates(shape: Sequence[int], batch: int) -> list[SampleDim]:
    """All places in which an input of this shape may hold the samples."""
    found = []
    for dim, size in enumerate(shape[:-1]):
        if size == batch:
            found.append(SampleDim(dim, "single"))
        elif size and size % batch == 0:
            found += [SampleDim(dim, "blocks"), SampleDim(dim, "interleaved")]
    return found


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
    return copy.deepcopy(leaf, {id(t): t.detach().clone() for t in _tensors_in(leaf, set())})


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
