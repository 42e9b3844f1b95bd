"""Launches the compiled CUDA kernels of csrc/cuda."""

from __future__ import annotations

import torch
from torch import Tensor

from .factors import Factors
from .gpu.kernels import Expand, Gradient, ReadDy, ReadX, Shrink
from .gpu.plan import Plan, PlanSizes

OPS = torch.ops.mlora_ext
_NO_DROPOUT = (None, None, None)


class CudaKernels:
    """The launches of backend `cuda`, one compiled operator each; see `gpu.kernels.LaunchKernels`."""

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        made = Plan.empty(sizes, segments.device)
        OPS.cuda_plan(segments, sizes.rows, made.tiles, made.splits, made.groups)
        return made

    def shrink(self, call: Shrink) -> None:
        OPS.cuda_shrink(
            call.rows, *_of(call.factors), call.plan.tiles, call.scaling, *(call.dropout or _NO_DROPOUT),
            call.out,
        )  # fmt: skip

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        OPS.cuda_reduce_rows(partial, out)

    def expand(self, call: Expand) -> None:
        OPS.cuda_expand(call.s, *_of(call.factors), call.plan.tiles, call.bias, call.y)

    def read_dy(self, call: ReadDy) -> None:
        OPS.cuda_read_dy(
            call.dy, call.s, *_of(call.factors), call.plan.tiles, call.plan.splits, call.scaling, call.ds,
            *_gradient(call.gradient),
        )  # fmt: skip

    def read_x(self, call: ReadX) -> None:
        OPS.cuda_read_x(
            call.x, call.ds, *_of(call.factors), call.plan.tiles, call.plan.splits,
            *(call.dropout or _NO_DROPOUT), call.dx, *_gradient(call.gradient),
        )  # fmt: skip

    def reduce_gradients(self, factors: Factors, plan: Plan, gradient: Gradient) -> None:
        OPS.cuda_reduce_gradients(factors.table, plan.groups, *gradient)


def _of(factors: Factors) -> tuple[Tensor, Tensor]:
    return factors.first, factors.table


def _gradient(gradient: Gradient | None) -> tuple[Tensor | None, Tensor | None, bool]:
    return gradient or (None, None, False)
