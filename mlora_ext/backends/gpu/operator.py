"""The operator on a GPU: its memory, and the launches of a backend around the frozen products.

The low-rank part is written first and the frozen product adds to it (beta = 1 with a plain weight). So y and
dx are written once and read once. One call serves one layer, or several that share x, adapters and layout
(q, k and v; gate and up), and reads x once for all. Letters: T rows, D = d_in, O = d_out of a layer, R
largest rank, N adapters, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...frozen.weight import FrozenWeight
from ..factors import Factors, factors_of
from .kernels import Dropout, Expand, Gradient, LaunchKernels, ReadDy, ReadX, Shrink
from .launches import Launch, backward_launches, column_splits, forward_launches
from .plan import SPLIT_TILES, Plan, PlanCache, PlanSizes

Matrices = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Batch:
    """The segments, scalings and dropout of a batch.

    Attributes:
        segments: `[S, 4]` int64.
        scaling: `[N]` fp32.
        dropout_p: `[N]` fp32, or None.
        dropout_rng: `[N, 2]` int64, or None.
        layers: `[L]` int64, the index of each layer in the whole model, or None.
    """

    segments: Tensor
    scaling: Tensor
    dropout_p: Tensor | None = None
    dropout_rng: Tensor | None = None
    layers: Tensor | None = None

    @property
    def dropout(self) -> Dropout | None:
        if self.dropout_p is None or self.dropout_rng is None or self.layers is None:
            return None
        return Dropout(self.dropout_p, self.dropout_rng, self.layers)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's frozen part and its B. The A of all layers are passed together.

    Attributes:
        frozen: W `[O, D]`.
        bias: `[O]`, or None.
        lora_b: per adapter `[O, r]`, or their table.
    """

    frozen: FrozenWeight
    bias: Tensor | None
    lora_b: Matrices | Factors


@dataclass(frozen=True, eq=False)
class Into:
    """Existing memory for gradients.

    Attributes:
        da: in the order of `lora_a`, or None; in the one dtype that the kernels read.
        db: by layer, or None; likewise.
        add: whether to add to the values there, as when micro-batches accumulate.
    """

    da: Matrices | None = None
    db: Sequence[Matrices] | None = None
    add: bool = True


class GpuOperator:
    """`mlora_ext::lora_linear` and its backward by one backend's kernels."""

    def __init__(self, kernels: LaunchKernels) -> None:
        self._kernels = kernels
        self._plans = PlanCache(kernels.plan)

    def forward(
        self, x: Tensor, layers: Sequence[Layer], lora_a: Matrices | Factors, batch: Batch
    ) -> tuple[list[Tensor], Tensor]:
        """Returns `y [T, O]` of every layer, and s `[L, T, R]`.

        Rows of x `[T, D]` may have any stride; their elements are dense. `lora_a` holds `[r, D]` of every
        adapter of the first layer, then of the second, and so on.
        """
        if not batch.scaling.numel():
            ys = [layer.frozen.matmul(x, layer.bias) for layer in layers]
            return ys, x.new_empty(len(layers), x.shape[0], 0)
        call = _Forward(self._kernels, self._plan(batch, x), x, layers, lora_a, batch)
        for launch in forward_launches(x.shape[1], len(layers)):
            call.run(launch)
        return call.y, call.s

    def backward(
        self,
        dys: Sequence[Tensor],
        x: Tensor,
        layers: Sequence[Layer],
        lora_a: Matrices | Factors,
        s: Tensor,
        batch: Batch,
        wanted: tuple[bool, bool, bool],
        into: Into = Into(),
    ) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
        """Returns dx `[T, D]`, dA in the order of `lora_a`, and dB by layer.

        dx is empty if not wanted. dA and dB are empty lists if they are not wanted or went into existing
        gradients.
        """
        need_dx, need_da, need_db = wanted
        if not batch.scaling.numel():
            dx = x.new_zeros(x.shape if need_dx else 0)
            for dy, layer in zip(dys, layers, strict=True):
                if need_dx:
                    layer.frozen.add_matmul_dx(dx, dy)
            return dx, [], [[] for _ in layers]
        plan = self._plan(batch, x)
        call = _Backward(self._kernels, plan, dys, x, layers, lora_a, s, batch, wanted, into)
        outs, several = tuple(dy.shape[1] for dy in dys), x.shape[0] > SPLIT_TILES
        for launch in backward_launches(
            outs, need_dx=need_dx, need_da=need_da, need_db=need_db, several=several
        ):
            call.run(launch)
        db = [_as(layer.lora_b, gradients) for gradients, layer in zip(call.db, layers, strict=True)]
        return call.dx, _as(lora_a, call.da), db

    def _plan(self, batch: Batch, x: Tensor) -> Plan:
        if batch.segments.device != x.device:
            raise ValueError(f"segments: expected device {x.device} (that of x), got {batch.segments.device}")
        sizes = PlanSizes(x.shape[0], batch.segments.shape[0], batch.scaling.numel())
        return self._plans.get(batch.segments, sizes)


class _Call:
    """One call; its methods are the launches."""

    def run(self, launch: Launch) -> None:
        getattr(self, launch.kernel)(launch.layer)


class _Forward(_Call):
    def __init__(
        self,
        kernels: LaunchKernels,
        plan: Plan,
        x: Tensor,
        layers: Sequence[Layer],
        lora_a: Matrices | Factors,
        batch: Batch,
    ) -> None:
        self.kernels, self.plan, self.x, self.layers, self.batch = kernels, plan, x, layers, batch
        self.a = _table(lora_a, False)
        self.y = [x.new_empty(x.shape[0], layer.frozen.shape[0]) for layer in layers]
        self.s = x.new_empty(len(layers), x.shape[0], self.a.max_rank)
        self.partial = _partial_rows(self.s, x.shape[1])

    def shrink(self, _: int) -> None:
        scaling, dropout = self.batch.scaling, self.batch.dropout
        self.kernels.shrink(Shrink(self.x, self.a, self.plan, scaling, self.partial, dropout))

    def reduce_s(self, _: int) -> None:
        self.kernels.reduce_rows(self.partial, self.s)

    def expand(self, layer: int) -> None:
        b = _table(self.layers[layer].lora_b, True)
        self.kernels.expand(Expand(self.s[layer], b, self.plan, self.layers[layer].bias, self.y[layer]))

    def base_gemm(self, layer: int) -> None:
        self.layers[layer].frozen.add_matmul(self.y[layer], self.x)


class _Backward(_Call):
    def __init__(
        self,
        kernels: LaunchKernels,
        plan: Plan,
        dys: Sequence[Tensor],
        x: Tensor,
        layers: Sequence[Layer],
        lora_a: Matrices | Factors,
        s: Tensor,
        batch: Batch,
        wanted: tuple[bool, bool, bool],
        into: Into,
    ) -> None:
        self.kernels, self.plan, self.dys, self.x = kernels, plan, dys, x
        self.layers, self.s, self.batch = layers, s, batch
        self.need_dx, self.need_da, self.need_db = wanted
        self.a = _table(lora_a, False, into.da)
        dbs: Sequence[Matrices | None] = into.db or [None] * len(layers)
        self.b = [_table(layer.lora_b, True, db) for layer, db in zip(layers, dbs, strict=True)]
        self.dx = x.new_empty(x.shape if self.need_dx else 0)
        self.add_da, self.add_db = (into.add and one.into is not None for one in (self.a, self.b[0]))
        self.da_buffer, self.da = _memory(self.a, self.need_da)
        memory = [_memory(b, self.need_db) for b in self.b]
        self.db_buffers, self.db = [buffer for buffer, _ in memory], [views for _, views in memory]
        self.ds = torch.empty_like(s)
        self.partial_ds = [_partial_rows(self.ds[i : i + 1], dy.shape[1]) for i, dy in enumerate(dys)]
        self.gradient: Gradient | None = None

    def read_dy(self, layer: int) -> None:
        b, buffer = self.b[layer], self.db_buffers[layer]
        self.gradient = self._gradient(b, 1, buffer, self.add_db) if self.need_db else None
        ds = self.partial_ds[layer] if self.need_dx or self.need_da else None
        dy, s, scaling = self.dys[layer], self.s[layer], self.batch.scaling
        self.kernels.read_dy(ReadDy(dy, s, b, self.plan, scaling, ds, self.gradient))

    def reduce_ds(self, layer: int) -> None:
        self.kernels.reduce_rows(self.partial_ds[layer], self.ds[layer : layer + 1])

    def read_x(self, _: int) -> None:
        layers = len(self.layers)
        self.gradient = self._gradient(self.a, layers, self.da_buffer, self.add_da) if self.need_da else None
        dx = self.dx if self.need_dx else None
        call = ReadX(self.x, self.ds, self.a, self.plan, self.batch.dropout, dx, self.gradient)
        self.kernels.read_x(call)

    def base_gemm_dx(self, layer: int) -> None:
        self.layers[layer].frozen.add_matmul_dx(self.dx, self.dys[layer])

    def reduce_da(self, _: int) -> None:
        self._reduce(self.a)

    def reduce_db(self, layer: int) -> None:
        self._reduce(self.b[layer])

    def _reduce(self, factors: Factors) -> None:
        """Adds up the partial gradients of the latest pass, and drops them."""
        if self.gradient is not None:
            self.kernels.reduce_gradients(factors, self.plan, self.gradient)
        self.gradient = None

    def _gradient(self, factors: Factors, layers: int, out: Tensor, add: bool) -> Gradient:
        shape = layers * self.plan.sizes.slots, self.s.shape[2], factors.width
        return Gradient(out, torch.empty(shape, dtype=torch.float32, device=self.x.device), add)


def _table(
    matrices: Matrices | Factors, transposed: bool, gradients: Sequence[Tensor] | None = None
) -> Factors:
    if isinstance(matrices, Factors):
        return matrices
    return factors_of(one_dtype(matrices), transposed=transposed, gradients=gradients)


def _memory(factors: Factors, wanted: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the buffer of gradients, and the gradients that are new."""
    if factors.into is not None:
        return factors.into[0], []
    return factors.gradients(wanted)


def _partial_rows(out: Tensor, width: int) -> Tensor:
    """Returns a product's output over `width` columns: `out` itself, or fp32 sums of its column splits."""
    splits = column_splits(width)
    return out if splits == 1 else torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)


def _as(matrices: Matrices | Factors, gradients: list[Tensor]) -> list[Tensor]:
    """Returns the gradients, which have the one dtype of the factors, in the dtypes of their matrices."""
    if isinstance(matrices, Factors) or all(
        matrix.dtype is gradients[0].dtype for matrix in matrices[: len(gradients)]
    ):
        return gradients
    return [gradient.to(matrix.dtype) for gradient, matrix in zip(gradients, matrices, strict=True)]


def one_dtype(matrices: Matrices) -> Matrices:
    """Returns the matrices in one dtype, as the kernels read them: fp32, which holds all, if they differ."""
    if all(matrix.dtype is matrices[0].dtype for matrix in matrices):
        return matrices
    return [matrix.float() for matrix in matrices]
