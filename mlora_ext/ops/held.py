"""Adapters that keep their gradients, as tables of addresses: host time does not grow with the adapters.

Autograd sees x and one anchor, and backward adds to the gradients itself, as `Router.accumulates` allows. The
tables are made once and serve until an adapter or a gradient lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from ..backends.factors import Factors, factors_of
from ..backends.interface import Adapters
from ..library import check_library

_KEPT = 64


@dataclass
class UpdateCounts:
    """Counts the updates of adapters in place, so that backward notices one after its forward pass."""

    count: int = 0
    latest: dict[str, int] = field(default_factory=dict)

    def record(self, name: str) -> None:
        """Counts an update of one adapter."""
        self.count += 1
        self.latest[name] = self.count

    def refuse(self, names: Sequence[str], since: int) -> None:
        """Raises RuntimeError, naming it, if one of these adapters was updated after the count `since`."""
        for name in names:
            if self.latest.get(name, 0) > since:
                raise RuntimeError(
                    f"adapter {name!r} was changed in place between forward and backward, for example by an "
                    "optimizer step; run backward before you change it"
                )


@dataclass(frozen=True, eq=False, slots=True)
class HeldAdapters:
    """Adapters of one layer, or of several that share x, as tables of addresses.

    Attributes:
        names: of the adapters.
        tables: of A and B.
        written: of each layer, the names of adapters to whose gradients backward has added; whoever clears
            a gradient takes its name out.
    """

    names: tuple[str, ...]
    tables: Adapters
    written: Sequence[set[str]]


class HeldByNames:
    """Keeps the tables of a layer, or of several that share x, by the names of a batch's adapters.

    They are made anew after Parameters or gradients have moved: `Router.moves` and `AdapterBank.moves` count.

    Args:
        kept: of how many compositions.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._held: dict[tuple[str, ...], HeldAdapters | None] = {}
        self._moves, self._kept = -1, kept

    def get(
        self, names: tuple[str, ...], moves: int, make: Callable[[tuple[str, ...]], HeldAdapters | None]
    ) -> HeldAdapters | None:
        """Returns the tables of these adapters; None where autograd must add to the gradients.

        Args:
            names: of the adapters.
            moves: the router's and the banks'.
            make: makes the tables, if none are kept since the last move.
        """
        if moves != self._moves:
            self._held.clear()
            self._moves = moves
        if names not in self._held:
            if len(self._held) >= self._kept:
                self._held.pop(next(iter(self._held)))
            self._held[names] = make(names)
        return self._held[names]

    def forget(self) -> None:
        """Drops all tables, which keep Parameters' and gradients' memory."""
        self._held.clear()

    def __getstate__(self) -> dict[str, object]:
        return {"_held": {}, "_moves": -1, "_kept": self._kept}

    def __deepcopy__(self, memo: object) -> HeldByNames:
        return HeldByNames(self._kept)


def hold(
    names: tuple[str, ...],
    lora_a: Sequence[nn.Parameter],
    lora_b: Sequence[nn.Parameter],
    written: Sequence[set[str]],
) -> HeldAdapters | None:
    """Returns tables of adapters, or None where autograd must add to the gradients.

    Every Parameter must be fp32 and have a dense fp32 gradient and no hook. Only fp32, because adding before
    rounding differs from adding after it.

    Args:
        names: of the adapters.
        lora_a: `[r, d_in]` of all adapters of the first layer, then of the second, and so on.
        lora_b: `[d_out, r]`, likewise.
        written: see `HeldAdapters`.
    """
    check_library()
    if not lora_a or not all(map(keeps_gradient, (*lora_a, *lora_b))):
        return None
    return HeldAdapters(names, Adapters(_table(lora_a, False), _table(lora_b, True)), written)


def _table(parameters: Sequence[nn.Parameter], transposed: bool) -> Factors:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return factors_of([p.detach() for p in parameters], transposed=transposed, gradients=gradients)


def keeps_gradient(parameter: nn.Parameter) -> bool:
    """Whether backward may add to a Parameter's gradient itself: fp32, dense, and without hooks."""
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad or type(gradient) is not Tensor:
        return False
    if parameter.dtype != torch.float32 or gradient.dtype != torch.float32 or gradient.is_sparse:
        return False
    if not (gradient.is_contiguous() or gradient.t().is_contiguous()):
        return False
    return not (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


@cache
@torch.inference_mode(False)
def anchor() -> Tensor:
    """Returns a tensor that requires a gradient: the graph holds a layer even if its x needs none."""
    return torch.empty(0, device="cpu", requires_grad=True)
