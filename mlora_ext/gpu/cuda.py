"""Launching the compiled CUDA kernels, which csrc/cuda holds; see `mlora_ext.gpu.kernels.LaunchKernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from .factors import Factors
from .kernels import Dropout
from .plan import Plan, PlanSizes

_LayerDropout = tuple[Tensor | None, Tensor | None, Tensor | None]


def _layer_of(dropout: Dropout | None, layer: int) -> _LayerDropout:
    if dropout is None:
        return None, None, None
    p, rng, layers = dropout
    return p, rng, layers.view(-1)[layer]


def _rows_of(tensor: Tensor, layer: int, count: int) -> Tensor:
    return tensor[layer * count : (layer + 1) * count]


class CudaKernels:
    """The backend's launches: one operator of the compiled library each.

    Its kernels serve one layer; layers that share x are launched one after the other, and add to one dx.
    """

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        made = Plan.empty(sizes, segments.device)
        torch.ops.mlora_ext.cuda_plan(segments, sizes.rows, made.tiles, made.splits, made.groups)
        return made

    def shrink(
        self,
        rows: Tensor,
        factors: Factors,
        plan: Plan,
        scaling: Tensor,
        dropout: Dropout | None,
        out: Tensor,
    ) -> None:
        for layer in range(out.shape[-3]):
            table = _rows_of(factors.table, layer, plan.sizes.adapters)
            drop, part = _layer_of(dropout, layer), out.select(-3, layer)
            torch.ops.mlora_ext.cuda_shrink(rows, factors.first, table, plan.tiles, scaling, *drop, part)

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        rank = out.shape[-1]
        parts = partial.view(partial.shape[0], out.numel() // max(rank, 1), rank)
        torch.ops.mlora_ext.cuda_reduce_rows(parts, out.view(-1, rank))

    def expand(self, s: Tensor, factors: Factors, plan: Plan, bias: Tensor | None, y: Tensor) -> None:
        torch.ops.mlora_ext.cuda_expand(s, factors.first, factors.table, plan.tiles, bias, y)

    def read_dy(
        self,
        dy: Tensor,
        s: Tensor,
        factors: Factors,
        plan: Plan,
        scaling: Tensor,
        ds: Tensor | None,
        gradient: Tensor | None,
        partial: Tensor,
        add: bool,
    ) -> None:
        torch.ops.mlora_ext.cuda_read_dy(
            dy,
            s,
            factors.first,
            factors.table,
            plan.tiles,
            plan.splits,
            scaling,
            ds is not None,
            gradient is not None,
            add,
            s if ds is None else ds.select(-3, 0),
            factors.first if gradient is None else gradient,
            partial,
        )

    def read_x(
        self,
        x: Tensor,
        ds: Tensor,
        factors: Factors,
        plan: Plan,
        dropout: Dropout | None,
        dx: Tensor | None,
        gradient: Tensor | None,
        partial: Tensor,
        add: bool,
    ) -> None:
        slots = plan.sizes.slots if len(partial) else 0
        for layer in range(len(ds)):
            torch.ops.mlora_ext.cuda_read_x(
                x,
                ds[layer],
                factors.first,
                _rows_of(factors.table, layer, plan.sizes.adapters),
                plan.tiles,
                plan.splits,
                *_layer_of(dropout, layer),
                dx is not None,
                gradient is not None,
                add,
                layer > 0,
                x if dx is None else dx,
                factors.first if gradient is None else gradient,
                _rows_of(partial, layer, slots),
            )

    def reduce_gradients(
        self, partial: Tensor, factors: Factors, plan: Plan, gradient: Tensor, add: bool
    ) -> None:
        count, slots = plan.sizes.adapters, plan.sizes.slots
        for layer in range(len(factors.table) // count):
            torch.ops.mlora_ext.cuda_reduce_gradients(
                _rows_of(partial, layer, slots),
                _rows_of(factors.table, layer, count),
                plan.groups,
                factors.width,
                add,
                gradient,
            )
