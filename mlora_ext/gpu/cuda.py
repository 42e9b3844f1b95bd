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


class CudaKernels:
    """The backend's launches: one operator of the compiled library each."""

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
        count = plan.sizes.adapters
        for layer in range(out.shape[-3]):
            table = factors.table[layer * count : (layer + 1) * count]
            part = out.select(-3, layer)
            torch.ops.mlora_ext.cuda_shrink(
                rows, factors.first, table, plan.tiles, scaling, *_layer_of(dropout, layer), part
            )

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        torch.ops.mlora_ext.cuda_reduce_rows(partial, out)

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
            s if ds is None else ds,
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
        torch.ops.mlora_ext.cuda_read_x(
            x,
            ds,
            factors.first,
            factors.table,
            plan.tiles,
            plan.splits,
            *_layer_of(dropout, 0),
            dx is not None,
            gradient is not None,
            x if dx is None else dx,
            factors.first if gradient is None else gradient,
            partial,
        )

    def reduce_gradients(
        self, partial: Tensor, factors: Factors, plan: Plan, gradient: Tensor, add: bool
    ) -> None:
        torch.ops.mlora_ext.cuda_reduce_gradients(
            partial, factors.table, plan.groups, factors.width, gradient
        )
