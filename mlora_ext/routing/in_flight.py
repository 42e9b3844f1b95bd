"""Forward passes in flight: their backward, and a recomputation inside it, may still come."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .route import Route

_TOKEN = "mlora_ext"


@dataclass(eq=False)
class ForwardInFlight:
    """A training forward pass.

    Attributes:
        token: dies with the pass's autograd graph; None for a pass without a known output.
        used: whether a backward that frees the graph has recomputed the pass.
    """

    route: Route
    token: weakref.ref[Any] | None
    used: bool = False

    def alive(self) -> bool:
        return self.token is None or self.token() is not None


class ForwardsInFlight:
    """The forward passes in flight of one model; `recorded`: whether there has ever been one."""

    def __init__(self) -> None:
        self._in_flight: list[ForwardInFlight] = []
        self.recorded = False

    def __len__(self) -> int:
        return len(self._in_flight)

    def __reduce__(self) -> tuple[type[ForwardsInFlight], tuple[()]]:
        return ForwardsInFlight, ()  # graphs are not copied with a model

    def alive(self) -> list[ForwardInFlight]:
        """Returns the passes whose autograd graph still lives."""
        return [flight for flight in self._in_flight if flight.alive()]

    def record(self, route: Route, token: weakref.ref[Any] | None) -> None:
        """Remembers a training forward pass until its autograd graph is freed, or until it is recomputed."""
        kept = [flight for flight in self.alive() if not flight.used]
        lasting = [flight for flight in kept if flight.token is None]
        # Without a token the end of a graph goes unnoticed: only the last of these passes is kept.
        kept = [flight for flight in kept if flight.token is not None or flight is lasting[-1]]
        self._in_flight = [*kept, ForwardInFlight(route, token)]
        self.recorded = route.recorded = True


class _Token:
    """Held by the autograd graph of a forward pass: a weak reference to it shows when the graph is gone."""


def attach_token(output: object) -> weakref.ref[Any] | None:
    """Attaches one token to the autograd nodes of all differentiable tensors in a model's output."""
    token, attached = _Token(), False
    for leaf in torch.utils._pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            metadata: Any = leaf.grad_fn.metadata
            metadata.setdefault(_TOKEN, []).append(token)
            attached = True
    return weakref.ref(token) if attached else None
