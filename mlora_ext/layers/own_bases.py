"""A linear layer in which some adapters have a base of their own, `W - scaling · B0 A0`.

Letters: T rows, D = d_in, O = d_out, R = rank of one adapter, N adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..adapters.registry import adapter_kind
from ..backends import run
from ..backends.interface import Layer
from ..backends.selection import Backend, backend_for
from ..frozen.weight import FrozenWeight
from ..routing.route import RouteTensors
from .mixed_kinds import MixedLayer


class _Product(FrozenWeight):
    """A frozen weight that only stands in for another one."""

    def __init__(self, base: FrozenWeight) -> None:
        self._base = base

    @property
    def shape(self) -> tuple[int, int]:
        """`(O, D)`."""
        return self._base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    @property
    def device(self) -> torch.device:
        return self._base.device

    @property
    def nbytes(self) -> int:
        """0: the bytes are those of the base."""
        return 0

    def dense(self) -> Tensor:
        """Raises RuntimeError: there is no one matrix."""
        raise RuntimeError(f"{type(self).__name__} has no single weight matrix")


class OwnBases(_Product):
    """`W + c_i B_i A_i [O, D]` for the rows of adapter i, and W for all other rows. Nothing is trained.

    The backend's kernels add the low-rank part, in both directions: `dy (W + c B A)` is `dy W` plus a
    low-rank part whose A is `Bᵀ` and whose B is `Aᵀ`. Launches do not grow with the adapters.

    Args:
        base: W.
        lora_a: per adapter `[R, D]`, contiguous, dtype of x or fp32.
        lora_b: per adapter `[O, R]`, transposed views, likewise.
        segments: `[S, 4]`, as the operator takes them; adapters are indices into the lists.
        scaling: `[N]`, c.
        backend: that of the layer's call.
    """

    def __init__(
        self,
        base: FrozenWeight,
        lora_a: Sequence[Tensor],
        lora_b: Sequence[Tensor],
        segments: Tensor,
        scaling: Tensor,
        backend: Backend,
    ) -> None:
        super().__init__(base)
        self._a, self._b = lora_a, lora_b
        self._plan = (segments, scaling, None, None, None)
        self._backend = backend

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x (W + c B A)ᵀ + b`."""
        weight, packed, _ = self._base.fused(x) or (None, None, None)
        return self._of(x, Layer(self._base, weight, bias, packed), self._a, self._b)

    def matmul_dx(self, dy: Tensor) -> Tensor:
        """Returns `dy (W + c B A)`."""
        a, b = [b.t() for b in self._b], [a.t() for a in self._a]
        return self._of(dy, Layer(_Transposed(self._base), None), a, b)

    def _of(self, x: Tensor, layer: Layer, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return run.forward(self._backend, x, [layer], a, b, self._plan)[0][0]

    def cast(self, dtype: torch.dtype) -> FrozenWeight:
        """Returns it over a base that is cast as autocast does."""
        return OwnBases(self._base.cast(dtype), self._a, self._b, *self._plan[:2], self._backend)  # type: ignore[arg-type]


class _Transposed(_Product):
    """`Wᵀ [D, O]`: its product is the base's `dy W`."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(D, O)`."""
        rows, columns = self._base.shape
        return columns, rows

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x W`; there is no bias."""
        return self._base.matmul_dx(x)

    def add_matmul(self, y: Tensor, x: Tensor) -> None:
        self._base.add_matmul_dx(y, x)


def own_products(
    x: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor], owners: Tensor, scaling: Tensor
) -> Tensor:
    """Returns `c_i x A_iᵀ B_iᵀ` of each row's adapter, `[..., O]`, in plain PyTorch: for compiled graphs.

    Args:
        x: `[..., D]`.
        lora_a: per adapter `[R, D]`.
        lora_b: per adapter `[O, R]`.
        owners: `[T]`, an index into the lists, or another number for rows without a product.
        scaling: `[N]`, c.
    """
    rows_TD = x.reshape(-1, x.shape[-1])
    ranks = [len(a) for a in lora_a]
    of = torch.tensor([index for index, rank in enumerate(ranks) for _ in range(rank)], device=x.device)
    a_RD, b_OR = torch.cat(list(lora_a)).to(x.dtype), torch.cat(list(lora_b), dim=1).to(x.dtype)
    s_TR = (rows_TD @ a_RD.t()) * scaling[of].to(x.dtype)
    s_TR = torch.where(owners.unsqueeze(1) == of, s_TR, torch.zeros_like(s_TR))
    return (s_TR @ b_OR.t()).view(*x.shape[:-1], -1)


def with_own_bases(layer: MixedLayer, names: Sequence[str], x: Tensor, active: RouteTensors) -> Tensor:
    """Returns the layer's output for a batch in which the adapters `names` have a base of their own."""
    fixed = [adapter_kind(layer.specs[name].kind).fixed_factors(layer.parameters_of(name)) for name in names]
    lora_a, lora_b = [a for a, _ in fixed], [b for _, b in fixed]
    x_dtype = _compute_dtype(x)
    if any(tensor.dtype not in (x_dtype, torch.float32) for tensor in (*lora_a, *lora_b)):
        lora_a, lora_b = [a.to(x_dtype) for a in lora_a], [b.to(x_dtype) for b in lora_b]
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    backend = "reference" if plain else backend_for(x.device, x_dtype)
    if backend == "reference":
        y = layer.added(x, active, layer.frozen)
        places = torch.tensor(
            [names.index(n) if n in names else -1 for n in (*active.names, "")], device="cpu"
        )
        owners, index = places.to(x.device)[active.owners()], [active.names.index(name) for name in names]
        return y - own_products(x, lora_a, lora_b, owners, active.scaling[index]).to(y.dtype)
    segments, scaling = active.subtracted(tuple(names))
    return layer.added(x, active, OwnBases(layer.frozen, lora_a, lora_b, segments, scaling, backend))


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
