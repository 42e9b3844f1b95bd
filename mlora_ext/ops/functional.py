"""The operator as a function: it checks the arguments, chooses a backend and calls it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.interface import PlanTensors
from ..backends.selection import backend_for
from ..frozen.base_gemm import dense_rows, frozen_linear
from ..frozen.plain import PlainWeight
from ..frozen.weight import FrozenWeight
from . import autograd, reference
from .dropout import LoRADropout
from .segments import SegmentLayout


def multi_lora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    scaling: Sequence[float] | Tensor,
    layout: SegmentLayout,
    dropout: LoRADropout | None = None,
) -> Tensor:
    """A frozen linear layer over the rows of many adapters, plus each adapter's low-rank part.

    `y = x W^T + b + scaling_i drop_i(x) A_i^T B_i^T` for the rows of adapter i (mLoRA, Eq. 2). Gradients
    flow to `x`, `lora_a` and `lora_b`. Each adapter's gradient depends on its own rows only.

    Args:
        x: `[..., d_in]` fp32, bf16 or fp16; leading dimensions are flattened to T rows.
        weight: `[d_out, d_in]`, dtype and device of x, frozen; may be a transposed view.
        bias: `[d_out]` or None, frozen.
        lora_a: per adapter `[r_i, d_in]`, dtype of x or fp32; any rank >= 1.
        lora_b: per adapter `[d_out, r_i]`, dtype of x or fp32.
        scaling: per adapter, `alpha / r` or `alpha / sqrt(r)`.
        layout: which of the T rows belong to which adapter.
        dropout: per adapter, on the input of the low-rank part; None = no dropout.

    Returns:
        `[..., d_out]`, in the dtype of x, or of autocast if that is on.

    Raises:
        ValueError: a shape, dtype, device, count or index does not fit; names the argument.
        RuntimeError: the compiled operators are missing.

    Example:
        >>> layout = SegmentLayout.from_lengths([3, 5])
        >>> y = multi_lora_linear(x, weight, None, [a0, a1], [b0, b1], [2.0, 0.5], layout)
        >>> y.sum().backward()
    """
    _check_base(x, weight, bias)
    for name, value, kind in (("layout", layout, SegmentLayout), ("dropout", dropout, LoRADropout)):
        if not isinstance(value, kind) and not (name == "dropout" and value is None):
            raise ValueError(f"{name}: expected a {kind.__name__}, got {value!r}")
    _check_adapters(x, weight, lora_a, lora_b)
    rows = x.numel() // x.shape[-1]
    _check_layout(rows, len(lora_a), layout)
    scaling = _scaling_tensor(scaling, len(lora_a), x)
    if dropout is not None and len(dropout.p) != len(lora_a):
        raise ValueError(f"dropout: expected p for {len(lora_a)} adapters, got {len(dropout.p)}")
    rng = (None, None, None) if dropout is None else dropout.tensors(x.device)
    frozen = PlainWeight.of(weight)
    return lora_linear_rows(x, frozen, bias, lora_a, lora_b, layout.table(x.device), scaling, *rng)


def lora_linear_rows(
    x: Tensor,
    frozen: FrozenWeight,
    bias: Tensor | None,
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    segments: Tensor,
    scaling: Tensor,
    dropout_p: Tensor | None,
    dropout_rng: Tensor | None,
    layer: Tensor | None,
) -> Tensor:
    """Runs `multi_lora_linear` on the operator's own tensors without checks; casts as autocast does."""
    if not lora_a:
        return frozen_linear(x, frozen, bias)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, frozen, bias = x.to(dtype), frozen.cast(dtype), None if bias is None else bias.to(dtype)
    for tensor in (*lora_a, *lora_b):
        if tensor.dtype is not x.dtype and tensor.dtype is not torch.float32:
            lora_a, lora_b = [a.to(x.dtype) for a in lora_a], [b.to(x.dtype) for b in lora_b]
            break
    x_TD = dense_rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    plan = (segments, scaling, dropout_p, dropout_rng, layer)
    backend = backend_for(x.device, x.dtype)
    if backend == "reference":
        with torch.autocast(x.device.type, enabled=False):
            y_TO, _ = reference.lora_linear(x_TD, frozen.dense(), bias, lora_a, lora_b, *plan)
    else:
        (y_TO,) = autograd.lora_linear(x_TD, [frozen], [bias], lora_a, lora_b, plan, backend)
    return y_TO if x.dim() == 2 else y_TO.view(*x.shape[:-1], y_TO.shape[-1])


def lora_linear_fused(
    x: Tensor,
    frozen: Sequence[FrozenWeight],
    biases: Sequence[Tensor | None],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    plan: PlanTensors,
) -> list[Tensor]:
    """Returns `[..., d_out]` of several layers that share x, by a GPU backend that reads x once.

    Arguments as in `ops.autograd.lora_linear`; each layer draws masks of its own.
    """
    x_TD = dense_rows(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))
    backend = backend_for(x.device, x.dtype)
    ys = autograd.lora_linear(x_TD, frozen, biases, lora_a, lora_b, plan, backend)
    return list(ys) if x.dim() == 2 else [y.view(*x.shape[:-1], y.shape[-1]) for y in ys]


def _check_base(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight: expected [d_out, {x.shape[-1] if x.dim() else 'd_in'}] for x of shape {list(x.shape)}, "
            f"got {list(weight.shape)}"
        )
    _check_like("weight", weight, x)
    if bias is not None:
        _check_like("bias", bias, x)
        if list(bias.shape) != [weight.shape[0]]:
            raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name}: expected a frozen tensor, got requires_grad=True; it gets no gradient: call "
                f"{name}.requires_grad_(False)"
            )


def _check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name}: expected device {x.device} (that of x), got {tensor.device}")
    autocast = torch.is_autocast_enabled(x.device.type)
    if tensor.dtype != x.dtype and not autocast:
        raise ValueError(f"{name}: expected {x.dtype} (that of x), got {tensor.dtype}")


def _check_adapters(x: Tensor, weight: Tensor, lora_a: Sequence[Tensor], lora_b: Sequence[Tensor]) -> None:
    if len(lora_a) != len(lora_b):
        raise ValueError(f"lora_b: expected one per adapter ({len(lora_a)}), got {len(lora_b)}")
    d_out, d_in = weight.shape
    for index, (a, b) in enumerate(zip(lora_a, lora_b, strict=True)):
        if a.dim() != 2 or a.shape[1] != d_in or a.shape[0] < 1:
            raise ValueError(f"lora_a[{index}]: expected [rank >= 1, {d_in}], got {list(a.shape)}")
        if list(b.shape) != [d_out, a.shape[0]]:
            raise ValueError(f"lora_b[{index}]: expected {[d_out, a.shape[0]]}, got {list(b.shape)}")
        for name, tensor in (("lora_a", a), ("lora_b", b)):
            if tensor.device != x.device:
                raise ValueError(
                    f"{name}[{index}]: expected device {x.device} (that of x), got {tensor.device}"
                )
            if not tensor.is_floating_point():
                raise ValueError(f"{name}[{index}]: expected floating point, got {tensor.dtype}")


def _check_layout(rows: int, adapters: int, layout: SegmentLayout) -> None:
    if layout.total_rows != rows:
        raise ValueError(f"layout: expected {rows} rows (those of x), got {layout.total_rows}")
    if layout.num_adapters > adapters:
        raise ValueError(
            f"layout: expected adapters below {adapters} (the length of lora_a), "
            f"got {layout.num_adapters - 1}"
        )


def scaling_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of scalings for x of this dtype: fp64 for fp64, else fp32, as the kernels read it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scaling_tensor(scaling: Sequence[float] | Tensor, adapters: int, x: Tensor) -> Tensor:
    if isinstance(scaling, int | float):
        raise ValueError(f"scaling: expected a list of one value per adapter ({adapters}), got {scaling}")
    tensor = torch.as_tensor(scaling, dtype=scaling_dtype(x.dtype), device=x.device)
    if list(tensor.shape) != [adapters]:
        raise ValueError(
            f"scaling: expected one value per adapter ({adapters}), got shape {list(tensor.shape)}"
        )
    return tensor
