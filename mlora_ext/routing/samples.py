"""Finds by experiment where the samples of a batch lie in a layer's input, once per kind of call.

A layer sees `[..., D]`, and the shape does not say which rows belong to which sample: `[B, S, D]` and
`[S, B, D]` look alike if B = S, and rows may be flattened, interleaved, selected, or shared by all samples.
So the frozen base runs a few times, without gradients: on a batch, and on copies of it in which some samples
have other contents. A row that changes belongs to one of the samples that changed. Sample b changes in the
passes that the binary digits of b + 1 name, so `ceil(log2(B + 1))` passes tell which sample each row belongs
to. Further passes, with samples in another order or twice, show what follows their order and what their
number. See `trial_passes`.

For Transformers' classes the results are data: see `sample_table`, whose entries these passes made and hold
true.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..out_of_memory import is_out_of_memory
from .trial_passes import FAILURES, Observer, TrialPasses

CLEAN, CHANGED, CHANGED_16_BITS = 4, 64, 16
BESIDE, BESIDE_16_BITS = 2**-10, 2**-4
"""Limits for comparing rows.

A row is clean in a pass if each column moved by at most `CLEAN` epsilons of the column's largest number, or
by at most the part `BESIDE` of what it moves by in another pass. It is changed if a column moved by more than
that and by more than `CHANGED` epsilons. Rows between the two are left out: a mixture of experts rounds rows
of other samples differently when its groups grow.
"""


class SampleDim(NamedTuple):
    """Where samples lie in a layer's input.

    Attributes:
        dim: the dimension that counts them.
        order: `single`: one entry per sample; `blocks`: several, each sample's entries adjacent;
            `interleaved`: several, all samples' first entries before their second ones.
    """

    dim: int
    order: Literal["single", "blocks", "interleaved"]

    @property
    def is_plain(self) -> bool:
        """Whether the input, flattened, has its rows in the order of the samples."""
        return self.dim == 0 and self.order != "interleaved"

    def owners(self, shape: Sequence[int], batch: int) -> Tensor:
        """Returns `[rows]` int64: the sample of each row."""
        index = torch.arange(shape[self.dim], device="cpu")
        index = index % batch if self.order == "interleaved" else index // (shape[self.dim] // batch)
        ones = [1] * (len(shape) - 2 - self.dim)
        return index.view(-1, *ones).expand(shape[:-1]).flatten()

    def samples_first(self, x: Tensor, batch: int) -> Tensor:
        """Returns x as `[batch, ..., D]`; a view."""
        if self.is_plain:
            return x
        if self.order == "interleaved":
            return x.unflatten(self.dim, (-1, batch)).movedim(self.dim + 1, 0)
        return x.unflatten(self.dim, (batch, -1)).movedim(self.dim, 0)

    def as_before(self, y: Tensor) -> Tensor:
        """Undoes `samples_first` for a result with the same leading dimensions; contiguous."""
        if self.is_plain:
            return y
        y = y.movedim(0, self.dim + (self.order == "interleaved"))
        return y.flatten(self.dim, self.dim + 1).contiguous()


class Places(Protocol):
    """Says where the samples of one forward pass lie in the layers' inputs."""

    def of(self, layer: str, shape: Sequence[int]) -> SampleDim | str:
        """Returns the place in a layer's input of this shape; a reason if it is unknown."""


class Found(NamedTuple):
    """A place that trial passes found.

    Attributes:
        ratios: a sample's entries in the dimension, divided by each of its sizes, see `sizes_of`.
    """

    place: SampleDim
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        return f"dimension {self.place.dim}, {self.place.order}"


@dataclass(frozen=True)
class FoundPlaces:
    """What trial passes found for one kind of call.

    Attributes:
        found: by layer and number of dimensions of its input; reasons where samples have no place.
        batch: samples of the forward pass.
        sizes: of each sample, see `sizes_of`.
    """

    found: Mapping[tuple[str, int], Found | str] = field(hash=False)
    batch: int
    sizes: tuple[float, ...]

    def of(self, layer: str, shape: Sequence[int]) -> SampleDim | str:
        """Returns the place if the entries of a sample follow one of its sizes, as in the trial passes."""
        found = self.found.get((layer, len(shape))) or self.found.get(EVERY, NOT_CALLED)
        if isinstance(found, str):
            return found
        place, ratios = found
        entries, rest = divmod(shape[place.dim], self.batch)
        follows = [ratio * size for ratio, size in zip(ratios, self.sizes, strict=True)]
        follows = [1.0] if place.order == "single" else follows
        fits = not rest and any(math.isclose(entries, number) for number in follows)
        return place if fits else OTHER_SHAPE


OTHER_SHAPE = "x had another shape in the trial passes; call the model again, which repeats them"
NOT_CALLED = "it was not called in the trial passes, or is called outside of the model's own forward"
EVERY = ("", 0)
"""Key of `FoundPlaces.found` that stands for all layers."""


def find_places(passes: TrialPasses, sizes: Sequence[float]) -> dict[tuple[str, int], Found | str]:
    """Finds where samples lie in the inputs of all layers that a forward pass calls.

    If the module fails in a pass, the result holds the reason under `EVERY`.
    """
    try:
        plain = passes.changed[0]
    except FAILURES as error:
        if is_out_of_memory(error):
            raise
        return {EVERY: f"the model failed in a trial pass ({type(error).__name__}: {error})"}
    inputs = {(layer, len(shape)): None for layer, calls in plain.seen.items() for shape, _ in calls}
    return {one: _find_place(passes, *one, sizes) for one in inputs}


def _find_place(passes: TrialPasses, layer: str, dims: int, sizes: Sequence[float]) -> Found | str:
    """Returns where samples lie in those inputs of a layer that have `dims` dimensions, or why not."""
    batch = passes.batch

    def calls(observer: Observer) -> Calls:
        return [one for one in observer.seen.get(layer, []) if len(one[0]) == dims]

    before = calls(passes.changed[0])
    found = _by_changes([calls(seen) for seen in passes.changed], batch)
    if isinstance(found, list):  # several places, or rows that changed with no sample
        found = _by_growth(before, [(count, calls(seen)) for count, seen in passes.grown], batch, found)
    if isinstance(found, str):
        return found
    if not _have_moved_on(found, before, calls(passes.rolled), batch):
        rolled = [calls(seen) for seen in passes.rolled_and_changed]
        again = _by_changes(rolled, batch) if rolled else "the model accepts its samples in this order only"
        if found != again and not (isinstance(again, list) and found in again):
            return "the order of its rows depends on their values"
    return _with_ratios(found, [shape for shape, _ in before], batch, sizes)


def _with_ratios(
    place: SampleDim, shapes: Sequence[torch.Size], batch: int, sizes: Sequence[float]
) -> Found | str:
    """Returns the place with its ratios, for use with other batches; a reason if the layer's calls differ."""
    entries = {shape[place.dim] // batch for shape in shapes}
    if place.order != "single" and len(entries) > 1:
        return "its calls get different numbers of rows for each sample"
    number = entries.pop()
    return Found(place, tuple(number / size if size else 0.0 for size in sizes))


Calls = Sequence[tuple[torch.Size, Tensor]]
"""Shape and compared columns of each input that a layer saw in one pass."""


def _by_changes(passes: Sequence[Calls], batch: int) -> SampleDim | str | list[SampleDim]:
    """Returns the place that fits the rows that changed in each pass, all places that do, or a reason."""
    if any([shape for shape, _ in calls] != [shape for shape, _ in passes[0]] for calls in passes):
        return "which rows it gets depends on their values, as in a mixture of experts"
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
    """Whether a dimension has one entry per sample, each with rows that only this sample changes."""
    if len(agree) != 1 or agree[0].order != "single":
        return False
    return bool(torch.bincount(owners[owners >= 0], minlength=batch).all())


def _owners(passes: Sequence[Calls]) -> Iterator[tuple[torch.Size, Tensor]]:
    """Yields each call's shape, and `[rows]` int64: the sample that each row changed with, -1 if unknown."""
    for index, (shape, rows) in enumerate(passes[0]):
        epsilon = torch.finfo(rows.dtype).eps
        beside = BESIDE if rows.element_size() > 2 else BESIDE_16_BITS
        moved = torch.stack([(calls[index][1].double() - rows.double()).abs() for calls in passes[1:]])
        if rows.numel():
            largest = rows.double().abs().amax(0)
            moved /= largest.clamp(min=BESIDE * float(largest.max()) or 1.0)
        noise = (beside * moved.amax(0)).clamp(min=CLEAN * epsilon)
        clean = (moved <= noise).all(-1)
        changed = ((moved > noise) & (moved > _noticed(rows) * epsilon)).any(-1)
        codes = (changed.long() << torch.arange(len(moved), device="cpu").unsqueeze(1)).sum(0)
        yield shape, torch.where((clean | changed).all(0), codes, 0) - 1


def _noticed(rows: Tensor) -> int:
    """Returns by how many epsilons a row must differ to count as another one."""
    return CHANGED if rows.element_size() > 2 else CHANGED_16_BITS


def _have_moved_on(place: SampleDim, before: Calls, after: Calls, batch: int) -> bool:
    """Whether each sample, after all moved on by one, looks like its predecessor before and like no other.

    If not, the model may order samples itself, some samples are equal, or they hold data that did not move.
    """
    if [shape for shape, _ in before] != [shape for shape, _ in after]:
        return False
    predecessors = torch.eye(batch, dtype=torch.bool, device="cpu").roll(1, 0)
    for (shape, rows), (_, rows_after) in zip(before, after, strict=True):
        if not rows.numel():
            continue
        limit = _noticed(rows) * torch.finfo(rows.dtype).eps * float(rows.abs().max())
        by_sample = place.owners(shape, batch).argsort(stable=True).view(batch, -1)
        each, each_after = (seen[by_sample].flatten(1) for seen in (rows, rows_after))
        alike = torch.stack([(each - sample).abs().amax(1) <= limit for sample in each_after])
        if not torch.equal(alike, predecessors):
            return False
    return True


def _by_growth(
    before: Calls, grown: Sequence[tuple[int, Calls]], batch: int, possible: Sequence[SampleDim]
) -> SampleDim | str:
    """Returns the one possible place whose dimension alone grows in proportion to the number of samples.

    `grown`: how many samples came twice, and the layer's calls then. Else returns a reason.
    """
    unknown = "its rows do not depend on the samples, such as positions that all samples share"
    left = list(possible)
    for count, after in grown:
        shapes = list(zip((shape for shape, _ in before), (shape for shape, _ in after), strict=False))
        dims = {dim for small, large in shapes for dim in range(len(small) - 1) if small[dim] != large[dim]}
        left = [place for place in left if dims == {place.dim}]
        grows = all(
            large[dim] * batch == small[dim] * (batch + count) for small, large in shapes for dim in dims
        )
        if not grows or len(before) != len(after):
            return unknown
    return left[0] if grown and len(left) == 1 else unknown


def _candidates(shape: Sequence[int], batch: int) -> list[SampleDim]:
    """Returns all places in which an input of this shape may hold the samples."""
    found = []
    for dim, size in enumerate(shape[:-1]):
        if size == batch:
            found.append(SampleDim(dim, "single"))
        elif size and size % batch == 0:
            found += [SampleDim(dim, "blocks"), SampleDim(dim, "interleaved")]
    return found
