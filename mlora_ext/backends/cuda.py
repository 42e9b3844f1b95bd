"""The backend `cuda`: the compiled CUDA kernels of csrc/cuda, one compiled call per direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .interface import Adapters, Layer, PlanTensors, Saved, Wanted
from .plan import Plan, PlanCache, PlanSizes

OPS = torch.ops.mlora_ext
MOST_LAYERS = 4
"""Most layers that share x of one call."""


class CudaOperator:
    """See `interface.GpuOperator`."""

    def __init__(self) -> None:
        self._plans = PlanCache(self.plan, OPS.cuda_capture.default)
        self.saves_masks = False

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        tables = OPS.cuda_plan.default(segments, sizes.rows, sizes.adapters, sizes.tiles, sizes.splits)
        return Plan(sizes, tables)

    def forward(
        self, x: Tensor, layers: Sequence[Layer], adapters: Adapters, plan: PlanTensors, masks: bool = True
    ) -> tuple[list[Tensor], Saved]:
        segments, scaling, *dropout = plan
        assert segments is not None
        assert scaling is not None
        a, b = adapters
        weights = [layer.weight for layer in layers if layer.weight is not None]
        products: list[Tensor] = []
        biases = _biases(layers)
        if len(weights) < len(layers):
            products = [layer.product.matmul(x, layer.bias) for layer in layers]
            weights, biases = [], []
        made = self._plans.get(segments, x.shape[0], scaling.shape[0])
        sizes = made.sizes
        ys, s, keep = OPS.cuda_forward.default(
            x, weights, biases, products, a.first, a.table, b.first, b.table, a.aligned, b.aligned,
            a.max_rank, made.whole, sizes.tiles, sizes.splits, scaling, *dropout,
            masks and self.saves_masks,
        )  # fmt: skip
        return products or ys, (s,) if keep is None else (s, keep)

    def backward(
        self,
        dys: Sequence[Tensor],
        x: Tensor,
        layers: Sequence[Layer],
        adapters: Adapters,
        saved: Saved,
        plan: PlanTensors,
        wanted: Wanted,
    ) -> Tensor | None:
        segments, scaling, *dropout = plan
        assert segments is not None
        assert scaling is not None
        (a, b), (need_dx, need_da, need_db) = adapters, wanted
        weights = [layer.weight for layer in layers if layer.weight is not None]
        product = None
        if len(weights) < len(layers):
            weights = []
            if need_dx:
                product = layers[0].product.matmul_dx(dys[0])
                for layer, dy in zip(layers[1:], dys[1:], strict=True):
                    layer.product.add_matmul_dx(product, dy)
        made = self._plans.get(segments, x.shape[0], scaling.shape[0])
        sizes = made.sizes
        dx = OPS.cuda_backward.default(
            dys, x, weights, product, a.first, a.table, a.into[0] if need_da and a.into else None,
            b.first, b.table, b.into[0] if need_db and b.into else None, a.aligned, b.aligned, a.max_rank,
            saved[0], saved[1] if len(saved) > 1 else None, made.whole, sizes.tiles, sizes.splits,
            sizes.slots, scaling, *dropout, need_dx, a.add,
        )  # fmt: skip
        return (dx if product is None else product) if need_dx else None


def _biases(layers: Sequence[Layer]) -> list[Tensor]:
    """Returns no bias if there is none, else one of each layer, without numbers where a layer has none."""
    biases = [layer.bias for layer in layers]
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return []
    return [some.new_empty(0) if bias is None else bias for bias in biases]
