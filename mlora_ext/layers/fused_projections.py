"""Layers that share their input, such as q, k and v: on a GPU one call computes them all."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..backends.cuda import MOST_LAYERS
from ..backends.selection import backend_for
from ..ops.autograd import lora_linear_held
from ..ops.functional import lora_linear_fused
from ..ops.held import HeldAdapters, HeldByNames, hold
from ..routing.route import RouteTensors
from ..routing.thread_guard import inside_backward
from .bank import AdapterBank

if TYPE_CHECKING:
    from .linear import MultiLoRALinear

_PATIENCE = 3


@dataclass
class _Waiting:
    """Outputs by layer index that no layer has taken yet, and the input that they were computed from."""

    outputs: dict[int, Tensor] = field(default_factory=dict)
    of: tuple[Any, ...] = ()


class FusedProjections:
    """Computes two or more layers of one parent in one call, as long as they get the same x in turn.

    The first layer that is called computes all outputs; the others take theirs. If a layer gets another x, as
    in cross-attention, all outputs are computed anew. After `_PATIENCE` such calls in a row, routes that
    begin later compute each layer alone. A route keeps its choice, so that backward recomputes what forward
    computed. Outputs of forward and of recomputation are kept apart.
    """

    def __init__(self, layers: Sequence[MultiLoRALinear]) -> None:
        self.layers = list(layers)
        self.disappointed = 0
        self._waiting = {False: _Waiting(), True: _Waiting()}
        self._indices: Tensor | None = None
        self._held = HeldByNames()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_waiting": {False: _Waiting(), True: _Waiting()}, "_indices": None}

    def forget(self) -> None:
        """Drops outputs that no layer has taken: a route has been left."""
        for waiting in self._waiting.values():
            waiting.outputs, waiting.of = {}, ()

    def forget_adapters(self) -> None:
        """Drops the tables of adapters; routes that are left may keep this object."""
        self._held.forget()

    def output(self, layer: MultiLoRALinear, x: Tensor, active: RouteTensors) -> Tensor | None:
        """Returns `y` of one layer, or None if it has to compute alone."""
        if backend_for(x.device, x.dtype) != "cuda" or not layer.own_bases.isdisjoint(active.names):
            return None
        recomputes = inside_backward()
        waiting = self._waiting[recomputes]
        shares = active.shares.setdefault(self, self.disappointed < _PATIENCE)
        index = self.layers.index(layer)
        if not (shares and index in waiting.outputs and _is_of(waiting, x)):
            if not (shares and self._alike(layer, x)):
                waiting.outputs, waiting.of = {}, ()
                return None
            if not recomputes:
                self.disappointed += bool(waiting.outputs)
            waiting.outputs, waiting.of = {}, ()
            waiting.outputs = dict(enumerate(self._compute(x, active)))
            waiting.of = (weakref.ref(x), x._version, torch.is_grad_enabled())
        y = waiting.outputs.pop(index)
        if not waiting.outputs:
            waiting.of = ()
            self.disappointed = 0 if not recomputes else self.disappointed
        return y

    def _alike(self, layer: MultiLoRALinear, x: Tensor) -> bool:
        """Whether one call can serve all layers: same adapters, one dtype, no autocast."""
        if x.is_inference() or torch.is_autocast_enabled(x.device.type):
            return False
        if len(self.layers) > MOST_LAYERS:
            return False
        return all(
            other.group is layer.group
            and other.plain_kinds
            and other.training == layer.training
            and other.frozen.dtype == x.dtype
            and _bank(other, "lora_A").dtype in (x.dtype, torch.float32)
            and _bank(other, "lora_B").dtype in (x.dtype, torch.float32)
            for other in self.layers
        )

    def _compute(self, x: Tensor, active: RouteTensors) -> Sequence[Tensor]:
        drops = self.layers[0].training and active.dropout_p is not None
        plan = active.plan(self._layer_indices() if drops else None)
        router, names = self.layers[0].router, active.names
        frozen = [layer.frozen for layer in self.layers]
        biases = [layer._parameters.get("bias") for layer in self.layers]
        if router.accumulates and torch.is_grad_enabled():
            banks = [_bank(layer, part) for layer in self.layers for part in ("lora_A", "lora_B")]
            held = self._held.get(names, router.moves + sum(bank.moves for bank in banks), self._hold)
            ys = held and lora_linear_held(x, frozen, biases, held, plan, router.updates)
            if ys:
                return ys
        return lora_linear_fused(x, frozen, biases, *self._matrices(names), plan)

    def _hold(self, names: tuple[str, ...]) -> HeldAdapters | None:
        return hold(names, *self._matrices(names), [layer.written for layer in self.layers])

    def _matrices(self, names: tuple[str, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Returns A, and B, of these adapters on all layers, layer after layer."""
        a, b = (
            [_bank(layer, part).parameter_of(name) for layer in self.layers for name in names]
            for part in ("lora_A", "lora_B")
        )
        return a, b

    @torch.inference_mode(False)
    def _layer_indices(self) -> Tensor:
        """Returns `[L]` int64, the layers' own `layer` values; made once per device."""
        device = self.layers[0].layer.device
        if self._indices is None or self._indices.device != device:
            self._indices = torch.stack([layer.layer for layer in self.layers])
        return self._indices


def _bank(layer: MultiLoRALinear, name: str) -> AdapterBank:
    return layer._modules[name]  # type: ignore[return-value]  # `nn.Module.__getattr__` is slow


def _is_of(waiting: _Waiting, x: Tensor) -> bool:
    if not waiting.of:
        return False
    seen, version, grad = waiting.of
    return seen() is x and (version, grad) == (x._version, torch.is_grad_enabled())
