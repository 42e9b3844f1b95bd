"""One linear layer with several LoRA adapters, and the ways to run it that are this project's own.

`peers.py` has those of others. Each is a `Contender`: called, it runs forward and backward through autograd,
as training does, and returns `[y, dx, dA_0, dB_0, dA_1, ...]`.
T rows, D = d_in, O = d_out, R = rank; adapter i has its own run of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import mlora_ext as mx
from mlora_ext.backends.selection import Backend, backend_for
from mlora_ext.frozen import base_gemm as gemm
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.frozen.weight import FrozenWeight
from mlora_ext.ops.autograd import lora_linear_held
from mlora_ext.ops.functional import lora_linear_fused, lora_linear_rows
from mlora_ext.ops.held import UpdateCounts, hold

Run = Callable[[], list[Tensor]]
SCALING = 2.0


@dataclass
class Layer:
    """One layer, its adapters and its input; `refresh` draws new data into the same memory.

    Attributes:
        x, dy: `[T, D]`, `[T, O]`.
        weight: `[O, D]`.
        lora_a, lora_b: per adapter `[R, D]` and `[O, R]`.
        p: dropout probability.
        lengths: rows of each adapter.
    """

    x: Tensor
    dy: Tensor
    weight: Tensor
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    p: float
    lengths: list[int]

    @classmethod
    def random(
        cls,
        lengths: Sequence[int],
        ranks: Sequence[int],
        d_in: int,
        d_out: int,
        dtype: torch.dtype,
        p: float,
        device: torch.device | str = "cpu",
    ) -> Layer:
        """A layer with adapters as trained ones look: neither A nor B is zero."""
        rows = sum(lengths)
        return cls(
            torch.randn(rows, d_in, device=device).to(dtype).requires_grad_(),
            torch.randn(rows, d_out, device=device).to(dtype),
            (torch.randn(d_out, d_in, device=device) / d_in**0.5).to(dtype),
            _bank(torch.randn(sum(ranks), d_in, device=device).to(dtype) / d_in**0.5, ranks),
            # B is the transposed view, as `MultiLoRALinear` keeps it
            [b.T for b in _bank((0.1 * torch.randn(sum(ranks), d_out, device=device)).to(dtype), ranks)],
            p,
            list(lengths),
        ).with_gradients()

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.x.device

    @property
    def ranks(self) -> list[int]:
        """Rank of each adapter."""
        return [a.shape[0] for a in self.lora_a]

    def with_gradients(self) -> Layer:
        """Itself, after asking for the gradients of its adapters."""
        for tensor in (*self.lora_a, *self.lora_b):
            tensor.requires_grad_()
        return self

    def refresh(self) -> None:
        """Fresh random input and gradient."""
        with torch.no_grad():
            self.x.copy_(torch.randn(self.x.shape, device=self.device))
            self.dy.copy_(torch.randn(self.dy.shape, device=self.device))

    def with_fp32_adapters(self) -> Layer:
        """The same layer with fp32 copies of the adapters, sharing everything else."""
        lora_a, lora_b = ([t.detach().float() for t in tensors] for tensors in (self.lora_a, self.lora_b))
        return replace(self, lora_a=lora_a, lora_b=lora_b).with_gradients()

    def exact(self) -> Layer:
        """The same numbers in fp64."""
        x, dy, weight = (tensor.detach().double() for tensor in (self.x, self.dy, self.weight))
        lora_a, lora_b = ([t.detach().double() for t in tensors] for tensors in (self.lora_a, self.lora_b))
        return Layer(x.requires_grad_(), dy, weight, lora_a, lora_b, self.p, self.lengths).with_gradients()

    def interleaved(self) -> list[Tensor]:
        """A_0, B_0, A_1, B_1, ..."""
        return [tensor for pair in zip(self.lora_a, self.lora_b, strict=True) for tensor in pair]


def _bank(rows: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    """Adapters as rows of one page, as a converted model keeps them."""
    ends = torch.tensor(ranks).cumsum(0).tolist()
    return [rows[end - rank : end] for end, rank in zip(ends, ranks, strict=True)]


@dataclass
class Contender:
    """A way to run a layer, or several.

    Attributes:
        dy: gradient of y.
        compute: the forward pass, to y.
        wanted: what gradients are for: x, then A and B of each adapter in turn.
        around: entered for every pass.
    """

    dy: Tensor
    compute: Callable[[], Tensor]
    wanted: list[Tensor]
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __call__(self) -> list[Tensor]:
        with self.around():
            y = self.compute()
            return [y, *self.gradients(y)]

    def forward(self) -> Run:
        """The forward pass alone, with what it keeps for backward."""

        def run() -> list[Tensor]:
            with self.around():
                return [self.compute()]

        return run

    def backward(self) -> Run:
        """The backward pass alone, over one forward pass made now; the layer must not be refreshed."""
        with self.around():
            y = self.compute()

        def run() -> list[Tensor]:
            with self.around():
                return self.gradients(y, keep=True)

        return run

    def gradients(self, y: Tensor, keep: bool = False) -> list[Tensor]:
        """Of x, and of A and B of each adapter in turn."""
        return list(torch.autograd.grad(y, self.wanted, self.dy, retain_graph=keep))


def frozen(layer: Layer) -> Contender:
    """`F.linear` and dX: what the base model costs without adapters."""
    return Contender(layer.dy, lambda: F.linear(layer.x, layer.weight), [layer.x])


def chosen_gemm(layer: Layer) -> Run:
    """The same two products by the library that mlora_ext chose, without autograd."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [gemm.linear(layer.x, layer.weight), gemm.linear_dx(layer.dy, layer.weight)]

    return run


def ours(layer: Layer, frozen: FrozenWeight | None = None, backend: Backend | None = None) -> Contender:
    """`multi_lora_linear` in any loop: autograd has a node for every A and B.

    Args:
        layer: what to run.
        frozen: the layer's weight of another kind, as packed; None: the plain weight.
        backend: which one serves; None: the device's own.
    """
    plan, weight = _plan(layer), frozen or PlainWeight.of(layer.weight)

    def compute() -> Tensor:
        return lora_linear_rows(layer.x, weight, None, layer.lora_a, layer.lora_b, *plan)  # type: ignore[arg-type]

    around = nullcontext if backend is None else lambda: mx.use_backend(backend)
    return Contender(layer.dy, compute, [layer.x, *layer.interleaved()], around)


class _KeptGradients(Contender):
    """Adapters keep their gradients, as in `Engine`; whoever steps them makes them zero."""

    def gradients(self, y: Tensor, keep: bool = False) -> list[Tensor]:
        x, *adapters = self.wanted
        x.grad = None
        y.backward(self.dy, retain_graph=keep)
        return [tensor.grad for tensor in (x, *adapters) if tensor.grad is not None]


def ours_held(layer: Layer) -> Contender:
    """The way of `Engine`: adapters keep their gradients, fp32, and backward adds to them.

    They are not made zero between calls, so only the first call's are those of the layer.
    """
    layer = layer.with_fp32_adapters()
    for tensor in layer.interleaved():
        tensor.grad = torch.zeros_like(tensor)
    names = tuple(f"a{i}" for i in range(len(layer.lora_a)))
    held = hold(names, layer.lora_a, layer.lora_b, [set()])  # type: ignore[arg-type]
    assert held is not None
    frozen, updates, plan = [PlainWeight.of(layer.weight)], UpdateCounts(), _plan(layer)

    def compute() -> Tensor:
        found = lora_linear_held(layer.x, frozen, [None], held, plan, updates)
        assert found is not None
        return found[0]

    return _KeptGradients(layer.dy, compute, [layer.x, *layer.interleaved()])


def sharing(layers: Sequence[Layer]) -> list[Layer]:
    """The layers with the first one's x, as q, k and v have it."""
    return [replace(layer, x=layers[0].x) for layer in layers]


def frozen_fused(layers: Sequence[Layer]) -> Run:
    """The products of layers that share x; each dX after the first is added to it, which takes no longer."""
    first, *others = layers

    def run() -> list[Tensor]:
        with torch.no_grad():
            ys = [F.linear(first.x, layer.weight) for layer in layers]
            dx = first.dy @ first.weight
            for layer in others:
                dx.addmm_(layer.dy, layer.weight)
        return [*ys, dx]

    return run


def ours_fused(layers: Sequence[Layer], backend: Backend | None = None) -> Run:
    """Layers that share x, in one call where the backend has such a call (`cuda`), else one after the other.

    Returns, when called, `[y_0, y_1, ..., dx]` and then dA and dB of each adapter, layer after layer.
    """
    x, (table, scaling, *drop) = layers[0].x, _plan(layers[0])
    frozen = [PlainWeight.of(layer.weight) for layer in layers]
    drop = drop[:2]  # each layer draws masks of its own
    numbers = torch.arange(len(layers), device=x.device) if layers[0].p else None
    lora_a, lora_b = (
        [a for layer in layers for a in layer.lora_a],
        [b for layer in layers for b in layer.lora_b],
    )
    wanted = [x, *(tensor for layer in layers for tensor in layer.interleaved())]
    dys = [layer.dy for layer in layers]

    def compute() -> list[Tensor]:
        if backend_for(x.device, x.dtype) == "cuda" and len(layers) > 1:
            plan = table, scaling, *drop, numbers
            return lora_linear_fused(x, frozen, [None] * len(layers), lora_a, lora_b, plan)
        each = [None] * len(layers) if numbers is None else numbers.unbind()
        return [
            lora_linear_rows(x, weight, None, one.lora_a, one.lora_b, table, scaling, *drop, number)
            for weight, one, number in zip(frozen, layers, each, strict=True)
        ]

    def run() -> list[Tensor]:
        with nullcontext() if backend is None else mx.use_backend(backend):
            ys = compute()
            return [*ys, *torch.autograd.grad(ys, wanted, dys)]

    return run


def _plan(layer: Layer) -> tuple[Tensor | None, ...]:
    """The operator's own tensors, built beforehand as a route does for all layers."""
    count, device = len(layer.lora_a), layer.device
    table = mx.SegmentLayout.from_lengths(layer.lengths).table(device)
    scaling = torch.full((count,), SCALING, device=device)
    dropout = mx.LoRADropout(p=[layer.p] * count, seeds=list(range(count)))
    return table, scaling, *(dropout.tensors(device) if layer.p else (None, None, None))
