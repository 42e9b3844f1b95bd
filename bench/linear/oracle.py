"""Whether a contender computes what it should: compared with the plain operator in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from linear import contenders
from linear.contenders import Layer, Run

ALLOWED = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative error, in the Frobenius norm, of any result, by dtype."""


class WrongResult(Exception):
    """A contender computed something else than the oracle."""


class Build(Protocol):
    """Makes a contender for a layer."""

    def __call__(self, layer: Layer) -> Run: ...


@dataclass(frozen=True)
class Entry:
    """A contender as the suite lists it.

    Attributes:
        name: in tables and results.
        build: makes it.
        mine: whether it is this project's; what another's cannot do is told of, and is no failure.
        adapters: whether it has any.
        drops: whether it applies the layer's dropout.
        own_masks: whether it draws masks other than the oracle's, so that it is compared without dropout.
    """

    name: str
    build: Build
    mine: bool = False
    adapters: bool = True
    drops: bool = True
    own_masks: bool = True


def errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """Relative error of each result, in the Frobenius norm."""
    pairs = zip(results, exact, strict=True)
    found = [
        (one.detach().double() - other).norm() / other.norm().clamp_min(1e-30)
        for one, other in ((one, other.detach()) for one, other in pairs)
    ]
    return torch.stack(found).cpu()


def compare(
    name: str,
    results: Sequence[Tensor],
    exact: Sequence[Tensor],
    dtype: torch.dtype,
    plain: Sequence[Tensor] | None = None,
) -> float:
    """The largest error of a contender's results.

    Args:
        name: of the contender.
        results: what it gave.
        exact: the same in fp64.
        dtype: what it computes in; `ALLOWED` by it.
        plain: the same by the plain operator in `dtype`; twice its error is allowed on top, for layers behind
            an attention, whose gradients are small differences.

    Raises:
        WrongResult: if an error is larger than allowed, or NaN; names the contender.
    """
    found = errors(results, exact)
    allowed = ALLOWED[dtype] + (torch.zeros_like(found) if plain is None else 2 * errors(plain, exact))
    wrong = ~(found <= allowed)
    if wrong.any():
        which = int(wrong.int().argmax())
        raise WrongResult(
            f"{name}, {dtype}: relative error {found[which]:.2e} of result {which}, "
            f"allowed {allowed[which]:.0e}"
        )
    return float(found.max())


class Oracle:
    """The right results of one layer, computed in fp64 when they are first asked for."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self._exact: dict[tuple[bool, bool], list[Tensor]] = {}

    def exact(self, adapters: bool, drop: bool) -> list[Tensor]:
        """`[y, dx, dA_0, dB_0, ...]`, or `[y, dx]` of the frozen layer."""
        key = adapters, drop and self.layer.p > 0
        if key not in self._exact:
            layer = self.layer.exact() if key[1] else replace(self.layer, p=0.0).exact()
            run = contenders.ours(layer, backend="reference") if adapters else contenders.frozen(layer)
            self._exact[key] = [tensor.detach() for tensor in run()]
        return self._exact[key]

    def check(self, entry: Entry) -> float:
        """Run a contender on the layer and compare; without dropout where it draws masks of its own.

        Raises:
            WrongResult: if it is too large; names the contender.
        """
        drop = entry.drops and not entry.own_masks
        layer = self.layer if drop else replace(self.layer, p=0.0)
        exact = self.exact(entry.adapters, drop)
        return compare(entry.name, entry.build(layer)(), exact, layer.x.dtype)
