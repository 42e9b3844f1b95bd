"""The ways of others to run one linear layer with several adapters; each is a `Contender`.

T rows, D = d_in, O = d_out, R = rank, N adapters; adapter i has its own run of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from linear.contenders import SCALING, Contender, Layer


def peft_loop(layer: Layer, autocast_adapter_dtype: bool = True) -> Contender:
    """PEFT's own LoRA layers over one shared base, each on its rows.

    Args:
        layer: what to run.
        autocast_adapter_dtype: PEFT's default, which keeps adapters of a bf16 or fp16 base in fp32; without
            it they have the dtype of the base, and PEFT is faster.
    """
    modules, wanted = [], [layer.x]
    for a, b in zip(layer.lora_a, layer.lora_b, strict=True):
        holder = nn.Module()
        holder.linear = nn.Linear(*layer.weight.T.shape, bias=False, device="meta")
        holder.linear.weight = nn.Parameter(layer.weight, requires_grad=False)
        rank = a.shape[0]
        config = LoraConfig(
            r=rank, lora_alpha=int(SCALING * rank), lora_dropout=layer.p, target_modules=["linear"]
        )
        peft_model = get_peft_model(holder, config, autocast_adapter_dtype=autocast_adapter_dtype)
        module = peft_model.base_model.model.linear
        with torch.no_grad():
            module.lora_A["default"].weight.copy_(a)
            module.lora_B["default"].weight.copy_(b)
        modules.append(module.train())
        wanted += [module.lora_A["default"].weight, module.lora_B["default"].weight]

    def compute() -> Tensor:
        parts = zip(modules, layer.x.split(layer.lengths), strict=True)
        return torch.cat([module(rows) for module, rows in parts])

    return Contender(layer.dy, compute, wanted)


@dataclass
class _Grouped(Contender):
    """Gradients of stacked, padded adapters as one of A and one of B for each."""

    ranks: list[int] = field(default_factory=list)

    def gradients(self, y: Tensor, keep: bool = False) -> list[Tensor]:
        dx, da, db = super().gradients(y, keep)
        parts = [(a[:r], b[:, :r]) for a, b, r in zip(da, db, self.ranks, strict=True)]
        return [dx, *(tensor for pair in parts for tensor in pair)]


def grouped_mm(layer: Layer) -> Contender:
    """`torch.nn.functional.grouped_mm` over stacked adapters, all padded with zeros to the largest rank.

    Strides of 16 bytes are what its kernels ask for, so that rank is a multiple of 8.

    Raises:
        ValueError: if the layer has dropout; the adapters share one input here.
        RuntimeError: from PyTorch, where it does not serve the dtype or the device.
    """
    if layer.p:
        raise ValueError(f"p: expected 0 for grouped_mm, got {layer.p}")
    if not hasattr(F, "grouped_mm"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
    rank = -(-max(layer.ranks) // 8) * 8
    pairs = zip(layer.lora_a, layer.lora_b, strict=True)
    a_NRD, b_NOR = (
        torch.stack(tensors).requires_grad_()
        for tensors in zip(
            *[
                (F.pad(a.detach(), (0, 0, 0, rank - len(a))), F.pad(b.detach(), (0, rank - len(a))))
                for a, b in pairs
            ],
            strict=True,
        )
    )
    ends = torch.tensor(layer.lengths, device=layer.device).cumsum(0).to(torch.int32)

    def compute() -> Tensor:
        s_TR = F.grouped_mm(layer.x, a_NRD.transpose(-2, -1), offs=ends) * SCALING
        return F.linear(layer.x, layer.weight) + F.grouped_mm(s_TR, b_NOR.transpose(-2, -1), offs=ends)

    return _Grouped(layer.dy, compute, [layer.x, a_NRD, b_NOR], ranks=layer.ranks)


def addmm_loop(layer: Layer, in_place: bool = True) -> Contender:
    """One base product, then a Python loop over the adapters' rows.

    Args:
        layer: what to run.
        in_place: add each adapter's part to its rows of y and dx with `addmm_` (mLoRA's in-place scatter);
            otherwise every part is a tensor of its own, and all are joined by `cat` and added at the end.
    """

    def compute() -> Tensor:
        options = (layer.lengths, layer.p, in_place)
        return _Loop.apply(layer.x, layer.weight, options, *layer.lora_a, *layer.lora_b)  # type: ignore[no-any-return]

    return Contender(layer.dy, compute, [layer.x, *layer.interleaved()])


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, options: tuple[list[int], float, bool], *adapters: Tensor
    ) -> Tensor:
        lengths, p, in_place = options
        lora_a, lora_b = adapters[: len(lengths)], adapters[len(lengths) :]
        y = F.linear(x, weight)
        dropped, masks, small, parts = [], [], [], []
        for rows, out, a, b in zip(x.split(lengths), y.split(lengths), lora_a, lora_b, strict=True):
            if p:
                rows, mask = torch.native_dropout(rows, p, True)
                masks.append(mask)
            s = (rows @ a.T).mul_(SCALING)
            if in_place:
                out.addmm_(s, b.T)
            else:
                parts.append(s @ b.T)
            dropped.append(rows)
            small.append(s)
        ctx.options = options
        ctx.save_for_backward(weight, *dropped, *masks, *small, *adapters)
        return y if in_place else y + torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        lengths, p, in_place = ctx.options
        weight, *saved = ctx.saved_tensors
        n = len(lengths)
        dropped, saved = saved[:n], saved[n:]
        masks, saved = (saved[:n], saved[n:]) if p else ([None] * n, saved)
        small, lora_a, lora_b = saved[:n], saved[n : 2 * n], saved[2 * n :]
        dx = dy @ weight
        grad_a, grad_b, parts = [], [], []
        for i, (grad, out) in enumerate(zip(dy.split(lengths), dx.split(lengths), strict=True)):
            ds = (grad @ lora_b[i]).mul_(SCALING)
            grad_b.append(grad.T @ small[i])
            grad_a.append(ds.T @ dropped[i])
            if not in_place:
                part = ds @ lora_a[i]
                parts.append(part.mul_(masks[i]).mul_(1 / (1 - p)) if p else part)
            elif p:
                out.addcmul_(ds @ lora_a[i], masks[i], value=1 / (1 - p))
            else:
                out.addmm_(ds, lora_a[i])
        if not in_place:
            dx = dx + torch.cat(parts)
        return dx, None, None, *grad_a, *grad_b
