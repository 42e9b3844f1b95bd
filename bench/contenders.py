"""The ways to run one linear layer with several LoRA adapters that `bench_linear.py` compares.

Each is a function that runs forward and backward through autograd, as training does, and returns
`[y, dx, dA_0, dB_0, dA_1, ...]`. T rows, D = d_in, O = d_out, R = rank; adapter i has its own run of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import mlora_ext as mx
from mlora_ext import gemm
from mlora_ext.functional import lora_linear_rows
from mlora_ext.gemm import PackedWeight

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
    """

    x: Tensor
    dy: Tensor
    weight: Tensor
    lora_a: list[Tensor]
    lora_b: list[Tensor]
    p: float

    @classmethod
    def random(
        cls, rows: int, d_in: int, d_out: int, adapters: int, rank: int, dtype: torch.dtype, p: float
    ) -> Layer:
        """A layer with adapters as trained ones look: neither A nor B is zero."""
        lora_a = [(torch.randn(rank, d_in) / d_in**0.5).to(dtype).requires_grad_() for _ in range(adapters)]
        # rows of a bank: B is the transposed view, as `MultiLoRALinear` keeps it
        lora_b = [(0.1 * torch.randn(rank, d_out)).to(dtype).T.requires_grad_() for _ in range(adapters)]
        return cls(
            torch.randn(rows, d_in).to(dtype).requires_grad_(),
            torch.randn(rows, d_out).to(dtype),
            (torch.randn(d_out, d_in) / d_in**0.5).to(dtype),
            lora_a,
            lora_b,
            p,
        )

    @property
    def lengths(self) -> list[int]:
        """Rows of each adapter."""
        return [len(rows) for rows in self.x.detach().tensor_split(len(self.lora_a))]

    def refresh(self) -> None:
        """Fresh random input and gradient."""
        with torch.no_grad():
            self.x.copy_(torch.randn(self.x.shape))
            self.dy.copy_(torch.randn(self.dy.shape))

    def with_fp32_adapters(self) -> Layer:
        """The same layer with fp32 copies of the adapters, sharing everything else."""
        lora_a = [a.detach().float().requires_grad_() for a in self.lora_a]
        lora_b = [b.detach().float().requires_grad_() for b in self.lora_b]
        return Layer(self.x, self.dy, self.weight, lora_a, lora_b, self.p)


def _interleaved(pairs_a: list[Tensor], pairs_b: list[Tensor]) -> list[Tensor]:
    return [tensor for pair in zip(pairs_a, pairs_b, strict=True) for tensor in pair]


def frozen(layer: Layer) -> Run:
    """`F.linear` and dX: what the base model costs without adapters."""

    def run() -> list[Tensor]:
        y = F.linear(layer.x, layer.weight)
        return [y, *torch.autograd.grad(y, [layer.x], layer.dy)]

    return run


def chosen_gemm(layer: Layer) -> Run:
    """The same two products by the library that mlora_ext chose, without autograd."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [gemm.linear(layer.x, layer.weight), gemm.linear_dx(layer.dy, layer.weight)]

    return run


def ours(layer: Layer, packed: PackedWeight | None = None) -> Run:
    """`multi_lora_linear` on the operator's own tensors, built beforehand as a route does for all layers.

    Args:
        layer: what to run.
        packed: as `mlora_ext.pack_base` gives a layer; None: the plain weight.
    """
    count = len(layer.lora_a)
    table = mx.SegmentLayout.from_lengths(layer.lengths).table()
    wanted = [layer.x, *_interleaved(layer.lora_a, layer.lora_b)]
    scaling = torch.full((count,), SCALING)
    dropout = mx.LoRADropout(p=[layer.p] * count, seeds=list(range(count)))
    p, rng, index = dropout.tensors("cpu") if layer.p else (None, None, None)

    def run() -> list[Tensor]:
        y = lora_linear_rows(
            layer.x, layer.weight, None, layer.lora_a, layer.lora_b, table, scaling, p, rng, index, packed
        )
        return [y, *torch.autograd.grad(y, wanted, layer.dy)]

    return run


def peft_loop(layer: Layer) -> Run:
    """PEFT's own LoRA layers over one shared base, each on its rows."""
    modules, wanted = [], [layer.x]
    for a, b in zip(layer.lora_a, layer.lora_b, strict=True):
        holder = nn.Module()
        holder.linear = nn.Linear(*layer.weight.T.shape, bias=False, device="meta")
        holder.linear.weight = nn.Parameter(layer.weight, requires_grad=False)
        rank = a.shape[0]
        config = LoraConfig(
            r=rank, lora_alpha=int(SCALING * rank), lora_dropout=layer.p, target_modules=["linear"]
        )
        module = get_peft_model(holder, config).base_model.model.linear
        with torch.no_grad():
            module.lora_A["default"].weight.copy_(a)
            module.lora_B["default"].weight.copy_(b)
        modules.append(module.train())
        wanted += [module.lora_A["default"].weight, module.lora_B["default"].weight]

    def run() -> list[Tensor]:
        parts = [module(rows) for module, rows in zip(modules, layer.x.split(layer.lengths), strict=True)]
        y = torch.cat(parts)
        return [y, *torch.autograd.grad(y, wanted, layer.dy)]

    return run


def addmm_loop(layer: Layer) -> Run:
    """One base product, then a Python loop of in-place `addmm_` over the adapters' rows."""
    wanted = [layer.x, *_interleaved(layer.lora_a, layer.lora_b)]

    def run() -> list[Tensor]:
        y = _AddmmLoop.apply(layer.x, layer.weight, layer.lengths, layer.p, *layer.lora_a, *layer.lora_b)
        return [y, *torch.autograd.grad(y, wanted, layer.dy)]

    return run


class _AddmmLoop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, lengths: list[int], p: float, *adapters: Tensor
    ) -> Tensor:
        lora_a, lora_b = adapters[: len(lengths)], adapters[len(lengths) :]
        y = F.linear(x, weight)
        dropped, masks, small = [], [], []
        for rows, out, a, b in zip(x.split(lengths), y.split(lengths), lora_a, lora_b, strict=True):
            if p:
                rows, mask = torch.native_dropout(rows, p, True)
                masks.append(mask)
            s = (rows @ a.T).mul_(SCALING)
            out.addmm_(s, b.T)
            dropped.append(rows)
            small.append(s)
        ctx.lengths, ctx.p = lengths, p
        ctx.save_for_backward(weight, *dropped, *masks, *small, *adapters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        weight, *saved = ctx.saved_tensors
        n = len(ctx.lengths)
        dropped, saved = saved[:n], saved[n:]
        masks, saved = (saved[:n], saved[n:]) if ctx.p else ([None] * n, saved)
        small, lora_a, lora_b = saved[:n], saved[n : 2 * n], saved[2 * n :]
        dx = dy @ weight
        grad_a, grad_b = [], []
        for i, (grad, out) in enumerate(zip(dy.split(ctx.lengths), dx.split(ctx.lengths), strict=True)):
            ds = (grad @ lora_b[i]).mul_(SCALING)
            grad_b.append(grad.T @ small[i])
            grad_a.append(ds.T @ dropped[i])
            if ctx.p:
                out.addcmul_(ds @ lora_a[i], masks[i], value=1 / (1 - ctx.p))
            else:
                out.addmm_(ds, lora_a[i])
        return dx, None, None, None, *grad_a, *grad_b
