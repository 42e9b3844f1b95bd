"""The backend `cuda`: the compiled CUDA kernels of csrc/cuda, one compiled call per direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..frozen.plain import PlainWeight
from .factors import factors_of
from .gpu_base_gemm import CUBLAS, GpuBaseGemm, Library, Shape, Way
from .interface import Adapters, Layer, PlanTensors, Saved, Wanted
from .plan import Plan, PlanCache, PlanSizes, describe

OPS = torch.ops.mlora_ext
MOST_LAYERS = 4
"""Most layers that share x of one call."""
_ADAPTERS, _RANK = 4, 16  # of a trial


class CudaOperator:
    """See `interface.GpuOperator`."""

    def __init__(self) -> None:
        self.saves_masks = False
        self.base_gemm = GpuBaseGemm(self._trial)
        self._plans = PlanCache(self.plan, OPS.cuda_capture.default)

    def use_base_gemm(self, library: Library) -> None:
        """Sets who multiplies; plans are made anew, since own products need more of them."""
        self.base_gemm.library = library
        self._plans = PlanCache(self.plan, OPS.cuda_capture.default)

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        own = self.base_gemm.library != "cublas"
        tables = OPS.cuda_plan.default(segments, sizes.rows, sizes.adapters, sizes.tiles, sizes.splits, own)
        return Plan(sizes, tables)

    def forward(
        self,
        x: Tensor,
        layers: Sequence[Layer],
        adapters: Adapters,
        plan: PlanTensors,
        masks: bool = True,
        way: Way | None = None,
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
        if way is None:
            way = self.base_gemm.way("forward", x, weights)
        made = self._plans.get(segments, x.shape[0], scaling.shape[0])
        sizes = made.sizes
        ys, s, keep = OPS.cuda_forward.default(
            x, weights, biases, products, a.first, a.table, b.first, b.table, a.aligned, b.aligned,
            a.max_rank, made.whole, sizes.tiles, sizes.splits, scaling, *dropout,
            masks and self.saves_masks, way.group,
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
        way: Way | None = None,
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
        if way is None:
            way = self.base_gemm.way("backward", x, weights) if need_dx else CUBLAS
        made = self._plans.get(segments, x.shape[0], scaling.shape[0])
        sizes = made.sizes
        dx = OPS.cuda_backward.default(
            dys, x, weights, product, a.first, a.table, a.into[0] if need_da and a.into else None,
            b.first, b.table, b.into[0] if need_db and b.into else None, a.aligned, b.aligned, a.max_rank,
            saved[0], saved[1] if len(saved) > 1 else None, made.whole, sizes.tiles, sizes.splits,
            sizes.slots, scaling, *dropout, need_dx, a.add,
            *way, self.base_gemm.reads_dy_once,
        )  # fmt: skip
        return (dx if product is None else product) if need_dx else None

    def _trial(self, shape: Shape, device: torch.device) -> Callable[[Way], Tensor]:
        """See `gpu_base_gemm.Trial`; draws from a generator of its own."""
        generator = torch.Generator(device).manual_seed(0)
        dtype = getattr(torch, shape.dtype)

        def random(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, device=device).normal_(generator=generator)

        T, D, O = shape.rows, shape.d_in, shape.d_out  # noqa: E741
        x, weight, dy = random(T, D), random(O, D), random(T, O)
        a = factors_of([random(_RANK, D, dtype=torch.float32) for _ in range(_ADAPTERS)], transposed=False)
        b = factors_of([random(O, _RANK, dtype=torch.float32) for _ in range(_ADAPTERS)], transposed=True)
        each = T // _ADAPTERS
        rows = [(i * each, (i + 1) * each, i, 0) for i in range(_ADAPTERS)]
        segments = torch.tensor(rows, dtype=torch.int64, device=device)
        describe(segments, rows)
        plan = segments, torch.ones(_ADAPTERS, dtype=torch.float32, device=device), None, None, None
        layers, wanted = [Layer(PlainWeight.of(weight), weight)], (True, True, True)
        if shape.direction == "forward":
            return lambda way: self.forward(x, layers, Adapters(a, b), plan, False, way)[0][0]
        saved = self.forward(x, layers, Adapters(a, b), plan, False, CUBLAS)[1]
        into = Adapters(a.new_gradients()[0], b.new_gradients()[0])
        return lambda way: self.backward([dy], x, layers, into, saved, plan, wanted, way)  # type: ignore[return-value]


def _biases(layers: Sequence[Layer]) -> list[Tensor]:
    """Returns no bias if there is none, else one of each layer, without numbers where a layer has none."""
    biases = [layer.bias for layer in layers]
    some = next((bias for bias in biases if bias is not None), None)
    if some is None:
        return []
    return [some.new_empty(0) if bias is None else bias for bias in biases]
