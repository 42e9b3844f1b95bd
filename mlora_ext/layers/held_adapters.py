"""Keeps the tables of layers' adapters, for batches of several compositions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..ops.held import HeldAdapters, hold
from .bank import AdapterBank

_KEPT = 64


class HoldingLayer(Protocol):
    """A layer with banks of adapters; `written` as in `HeldAdapters`."""

    lora_A: AdapterBank
    lora_B: AdapterBank
    written: set[str]
    _modules: dict[str, Any]


class HeldByNames:
    """The tables of one layer, or of several that share x, by the names of a batch's adapters.

    They are made anew after Parameters or gradients have moved: `Router.moves` and `AdapterBank.moves` count.

    Args:
        kept: of how many compositions.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._held: dict[tuple[str, ...], HeldAdapters | None] = {}
        self._moves, self._kept = -1, kept

    def get(self, names: tuple[str, ...], layers: Sequence[HoldingLayer], moves: int) -> HeldAdapters | None:
        """Returns the tables of these adapters; None where autograd must add to the gradients.

        Args:
            names: of the adapters.
            layers: one, or several that share x.
            moves: the router's.
        """
        for layer in layers:
            banks = layer._modules  # `nn.Module.__getattr__` is slow
            moves += banks["lora_A"].moves + banks["lora_B"].moves
        return self.find(
            names,
            moves,
            lambda: hold(
                names,
                [[layer.lora_A.parameter_of(name) for name in names] for layer in layers],
                [[layer.lora_B.parameter_of(name) for name in names] for layer in layers],
                [layer.written for layer in layers],
            ),
        )

    def find(
        self, names: tuple[str, ...], moves: int, make: Callable[[], HeldAdapters | None]
    ) -> HeldAdapters | None:
        """Returns the tables of these adapters; `make` makes them if none are kept since the last move."""
        if moves != self._moves:
            self._held.clear()
            self._moves = moves
        if names not in self._held:
            if len(self._held) >= self._kept:
                self._held.pop(next(iter(self._held)))
            self._held[names] = make()
        return self._held[names]

    def forget(self) -> None:
        """Drops all tables, which keep Parameters' and gradients' memory."""
        self._held.clear()

    def __getstate__(self) -> dict[str, object]:
        return {"_held": {}, "_moves": -1, "_kept": self._kept}

    def __deepcopy__(self, memo: object) -> HeldByNames:
        return HeldByNames(self._kept)
