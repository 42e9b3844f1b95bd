"""Launches the Triton kernels: grids and compile-time arguments. Nothing here grows with the adapters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..factors import Factors
from ..gpu.kernels import Expand, Gradient, ReadDy, ReadX, Shrink
from ..gpu.launches import column_splits
from ..gpu.plan import COLUMN_SPLIT, SPLIT_TILES, TILE_ROWS, Plan, PlanSizes
from .blocks import PANEL as _PANEL
from .configs import REDUCE_COLUMNS, REDUCE_RANKS, REDUCE_ROWS, Config, config
from .expand import expand
from .plan import plan
from .read_dy import read_dy
from .read_x import read_x
from .reduce import reduce_gradients, reduce_rows
from .shrink import shrink

INTERPRETED: bool = triton.knobs.runtime.interpret and not isinstance(tl.sum, triton.JITFunction)
"""Whether these kernels and those of Triton's own library were made for its interpreter."""
PANEL: int = _PANEL.value
_PLAN_BLOCK = 64


class Kernels:
    """The launches of backend `triton`; see `gpu.kernels.LaunchKernels`."""

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        made = Plan.empty(sizes, segments.device)
        with _on(segments):
            plan[sizes.segments + sizes.adapters + 2,](
                segments, made.tiles, made.splits, made.groups,
                sizes.segments, sizes.rows, sizes.adapters, sizes.tiles, sizes.splits,
                TILE=TILE_ROWS, SPLIT=SPLIT_TILES, BLOCK=_PLAN_BLOCK,
            )  # fmt: skip
        return made

    def shrink(self, call: Shrink) -> None:
        rows, factors, out = call.rows, call.factors, call.out
        how = config("shrink", *_target(rows))
        siblings, total, R = out.shape[-3:]
        panels = triton.cdiv(R, PANEL)
        grid = (call.plan.sizes.tiles * siblings * panels, column_splits(factors.width))
        with _on(rows):
            shrink[grid](
                rows, rows.stride(0), factors.first, factors.table, call.plan.tiles, call.scaling,
                *(call.dropout or (rows, rows, rows)), out, siblings * total * R, total * R,
                factors.width, R, call.plan.sizes.adapters, panels, SIBLINGS=siblings,
                COLUMN_SPLIT=COLUMN_SPLIT, DROP=call.dropout is not None, **_of(factors), ROWS=TILE_ROWS,
                COLUMNS=how.columns, **_options(how),
            )  # fmt: skip

    def reduce_rows(self, partial: Tensor, out: Tensor) -> None:
        R = out.shape[-1]
        rows = out.numel() // max(R, 1)
        with _on(out):
            reduce_rows[triton.cdiv(rows, REDUCE_ROWS), triton.cdiv(R, REDUCE_RANKS)](
                partial, out, rows, R, partial.shape[0],
                INTERPRETED=INTERPRETED, ROWS=REDUCE_ROWS, RANKS=REDUCE_RANKS,
            )  # fmt: skip

    def expand(self, call: Expand) -> None:
        s, factors, y = call.s, call.factors, call.y
        how = config("expand", *_target(s))
        with _on(s):
            expand[call.plan.sizes.tiles, triton.cdiv(factors.width, how.columns)](
                s, factors.first, factors.table, call.plan.tiles, s if call.bias is None else call.bias, y,
                factors.width, s.shape[1], BIAS=call.bias is not None, **_of(factors), ROWS=TILE_ROWS,
                COLUMNS=how.columns, **_options(how),
            )  # fmt: skip

    def read_dy(self, call: ReadDy) -> None:
        dy, s, factors, plan = call.dy, call.s, call.factors, call.plan
        how = config("read_dy", *_target(dy))
        splits, R = column_splits(factors.width), s.shape[1]
        panels, blocks = triton.cdiv(R, PANEL), triton.cdiv(factors.width, how.gradient_columns)
        out, partial, add = call.gradient or (s, s, False)
        each = (SPLIT_TILES * splits * (call.ds is not None) + blocks * (call.gradient is not None)) * panels
        with _on(dy):
            read_dy[plan.sizes.splits * each,](
                dy, dy.stride(0), s, factors.first, factors.table, plan.tiles, plan.splits, call.scaling,
                s if call.ds is None else call.ds, out, partial,
                dy.shape[0] * R, factors.width, R, splits, panels, blocks,
                SPLIT_TILES=SPLIT_TILES, COLUMN_SPLIT=COLUMN_SPLIT, DS=call.ds is not None,
                GRADIENT=call.gradient is not None, ADD=add, **_of(factors), ROWS=TILE_ROWS,
                COLUMNS=how.columns, GRADIENT_ROWS=how.rows, GRADIENT_COLUMNS=how.gradient_columns,
                **_options(how),
            )  # fmt: skip

    def read_x(self, call: ReadX) -> None:
        x, ds, factors, plan = call.x, call.ds, call.factors, call.plan
        how = config("read_x", *_target(x))
        siblings, total, R = ds.shape
        panels = triton.cdiv(R, PANEL)
        out, partial, add = call.gradient or (x, x, False)
        with _on(x):
            read_x[triton.cdiv(factors.width, how.columns) * panels, plan.sizes.splits](
                x, x.stride(0), ds, factors.first, factors.table, plan.tiles, plan.splits,
                *(call.dropout or (ds, ds, ds)), x if call.dx is None else call.dx, out, partial, total * R,
                plan.sizes.slots, factors.width, R, plan.sizes.adapters, panels, SIBLINGS=siblings,
                DX=call.dx is not None, GRADIENT=call.gradient is not None, DROP=call.dropout is not None,
                ADD=add, **_of(factors), SPLIT_TILES=SPLIT_TILES, TILE=TILE_ROWS, ROWS=how.rows,
                COLUMNS=how.columns, **_options(how),
            )  # fmt: skip

    def reduce_gradients(self, factors: Factors, plan: Plan, gradient: Gradient) -> None:
        out, partial, add = gradient
        R = partial.shape[1]
        grid = (triton.cdiv(factors.width, REDUCE_COLUMNS), len(factors.shapes), triton.cdiv(R, REDUCE_RANKS))
        with _on(out):
            reduce_gradients[grid](
                partial, factors.table, plan.groups, out, plan.sizes.slots, factors.width, R,
                plan.sizes.adapters,
                ADD=add, ROWS_DENSE=factors.rows_dense, ALIGNMENT=factors.alignment,
                INTERPRETED=INTERPRETED, RANKS=REDUCE_RANKS, COLUMNS=REDUCE_COLUMNS,
            )  # fmt: skip


def buckets(max_rank: int) -> int:
    """Returns how many of the rank buckets 16, 32, 64 a kernel must hold."""
    return next(count for count in range(1, 4) if max_rank <= 8 << count or count == 3)


def _of(factors: Factors) -> dict[str, int | bool]:
    return {
        "ROWS_DENSE": factors.rows_dense,
        "ALIGNMENT": factors.alignment,
        "INTERPRETED": INTERPRETED,
        "BUCKETS": buckets(factors.max_rank),
    }


def _options(how: Config) -> dict[str, int | bool]:
    # enable_fp_fusion is set, since its default depends on Triton's version, and bits would too.
    return {"num_warps": how.warps, "num_stages": how.stages, "enable_fp_fusion": True}


def _on(tensor: Tensor) -> AbstractContextManager[None]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()  # type: ignore[return-value]


def _target(tensor: Tensor) -> tuple[str, int]:
    return _architecture(tensor.device), tensor.element_size()


@cache
def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return "sm_80"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
