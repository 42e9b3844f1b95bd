"""Inputs of the operator for every situation that the design lists."""

from dataclasses import dataclass, field

import torch
from tolerances import assert_as_exact, in_other_orders

import mlora_ext as mx
from mlora_ext.ops import reference


@dataclass
class Case:
    """One call of the operator; tensors that gradients are checked for require them."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    lora_a: list[torch.Tensor]
    lora_b: list[torch.Tensor]
    scaling: list[float]
    layout: mx.SegmentLayout
    dropout: mx.LoRADropout | None
    dy: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.dy = torch.randn(*self.x.shape[:-1], self.weight.shape[0]).to(self.x.dtype)
        self.require_grad()

    def require_grad(self) -> None:
        for tensor in (self.x, *self.lora_a, *self.lora_b):
            tensor.requires_grad_()

    def to(self, dtype: torch.dtype) -> "Case":
        """The same values in another dtype, adapters too; memory layouts are kept."""
        clone = object.__new__(Case)
        clone.__dict__.update(self.__dict__)
        for name in ("x", "weight", "bias", "dy"):
            tensor = getattr(self, name)
            setattr(clone, name, None if tensor is None else tensor.detach().to(dtype))
        clone.lora_a = [a.detach().to(dtype) for a in self.lora_a]
        clone.lora_b = [b.detach().to(dtype) for b in self.lora_b]
        clone.require_grad()
        return clone

    def arguments(self) -> tuple:
        """Of `multi_lora_linear`."""
        return (
            self.x, self.weight, self.bias, self.lora_a, self.lora_b, self.scaling, self.layout, self.dropout,
        )  # fmt: skip

    def operator_arguments(self) -> tuple:
        """Of `mlora_ext::lora_linear`."""
        device = self.x.device
        rng = (None, None, None) if self.dropout is None else self.dropout.tensors(device)
        return (
            self.x.reshape(-1, self.x.shape[-1]), self.weight, self.bias, self.lora_a, self.lora_b,
            self.layout.table(device), torch.tensor(self.scaling, device=device), *rng,
        )  # fmt: skip

    def gradients(self, y: torch.Tensor) -> list[torch.Tensor]:
        """Of x, every A and every B."""
        wanted = [self.x, *self.lora_a, *self.lora_b]
        found = torch.autograd.grad(y, wanted, self.dy, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]

    def reference(self) -> list[torch.Tensor]:
        """y and the gradients by plain PyTorch and plain autograd, in this case's dtype."""
        y = reference.lora_linear(*self.operator_arguments())[0].view(*self.x.shape[:-1], len(self.weight))
        return [y.detach(), *self.gradients(y)]

    def run(self) -> list[torch.Tensor]:
        """y and the gradients by the chosen backend."""
        y = mx.multi_lora_linear(*self.arguments())
        return [y.detach(), *self.gradients(y)]

    def labels(self) -> list[str]:
        n = len(self.lora_a)
        return ["y", "dx", *(f"dA[{i}]" for i in range(n)), *(f"dB[{i}]" for i in range(n))]


def alone_of(together: Case, rows: torch.Tensor | slice, lengths: list[int], adapter: int = 0) -> Case:
    """An adapter's rows of a case with dropout, in segments of these lengths, without the others."""
    own = slice(adapter, adapter + 1)
    alone = object.__new__(Case)
    alone.__dict__.update(together.__dict__)
    alone.x, alone.dy = together.x[rows].detach().clone().requires_grad_(), together.dy[rows].clone()
    alone.lora_a, alone.lora_b, alone.scaling = (
        together.lora_a[own],
        together.lora_b[own],
        together.scaling[own],
    )
    alone.layout = mx.SegmentLayout.from_lengths(lengths, [0] * len(lengths))
    drop = together.dropout
    alone.dropout = mx.LoRADropout(drop.p[own], drop.seeds[own], drop.step[own], drop.layer)
    return alone


def assert_right(case: Case, results: list[torch.Tensor] | None = None) -> None:
    """Compare `results` (those of `case.run()`) with the oracle, by the policy of tolerances.py."""
    results = case.run() if results is None else results
    plain, oracle = in_other_orders(case.to(case.x.dtype).reference), case.to(torch.float64).reference()
    for what, result, same, exact in zip(case.labels(), results, plain, oracle, strict=True):
        assert_as_exact(result, same, exact, what)


def make(
    ranks: list[int],
    lengths: list[int],
    adapters: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    adapter_dtype: torch.dtype | None = None,
    d_in: int = 40,
    d_out: int = 24,
    bias: bool = True,
    p: float | list[float] | None = None,
    row0: list[int] | None = None,
) -> Case:
    """Random values of unit scale, so that no term of the result is lost beside another."""
    adapter_dtype = adapter_dtype or dtype
    n = len(ranks)
    dropout = None
    if p is not None:
        seeds = torch.randint(2**62, (n,)).tolist()
        dropout = mx.LoRADropout([p] * n if isinstance(p, float) else p, seeds, step=list(range(n)), layer=3)
    return Case(
        torch.randn(sum(lengths), d_in).to(dtype),
        (torch.randn(d_out, d_in) / d_in**0.5).to(dtype),
        torch.randn(d_out).to(dtype) if bias else None,
        [(torch.randn(r, d_in) / d_in**0.5).to(adapter_dtype) for r in ranks],
        # As in the bank: transposed views of rows [r, d_out].
        [(torch.randn(r, d_out) / r**0.5).to(adapter_dtype).t() for r in ranks],
        [0.5 + 0.25 * i for i in range(n)],
        mx.SegmentLayout.from_lengths(lengths, adapters, row0),
        dropout,
    )


def _strided_rows(**how) -> Case:
    case = make([4, 7], [9, 6], [0, 1], **how)
    case.x = torch.randn(15, 80).to(case.x.dtype)[:, 20:60].requires_grad_()
    return case


def _transposed_x(**how) -> Case:
    case = make([4, 7], [9, 6], [0, 1], **how)
    case.x = case.x.detach().t().contiguous().t().requires_grad_()
    return case


def _transposed_weight(**how) -> Case:
    case = make([4, 7], [9, 6], [0, 1], **how)
    case.weight = case.weight.t().contiguous().t()
    return case


def _contiguous_b(**how) -> Case:
    case = make([4, 7], [9, 6], [0, 1], **how)
    case.lora_b = [b.detach().contiguous().requires_grad_() for b in case.lora_b]
    return case


def _batched_x(**how) -> Case:
    case = make([4, 7], [9, 6], [0, 1], **how)
    case.x = case.x.detach().view(3, 5, 40).requires_grad_()
    case.dy = case.dy.view(3, 5, 24)
    return case


def _misaligned(**how) -> Case:
    case = make([3, 5], [9, 6], [0, 1], d_in=41, d_out=23, **how)
    case.x = torch.randn(15 * 41 + 1).to(case.x.dtype)[1:].view(15, 41).requires_grad_()
    return case


CASES = {
    "any rank": lambda **how: make([1, 3, 8, 17, 64], [5, 9, 2, 30, 11], [0, 1, 2, 3, 4], **how),
    "one adapter": lambda **how: make([16], [70], [0], **how),
    "nine adapters": lambda **how: make([2 + i for i in range(9)], [4] * 9, list(range(8, -1, -1)), **how),
    "empty segments": lambda **how: make([4, 7, 5], [0, 8, 0, 3, 0], [0, 1, 2, 0, -1], **how),
    "adapter without rows": lambda **how: make([4, 7], [10], [1], **how),
    "no rows at all": lambda **how: make([4, 7], [], [], **how),
    "one-row segments": lambda **how: make([4, 7, 5], [1, 1, 1, 1], [2, 0, 1, 0], **how),
    "several segments": lambda **how: make([4, 7], [6, 5, 130, 9], [0, 1, 0, 1], **how),
    "rows given": lambda **how: make([4, 7], [6, 5, 8], [0, 1, 0], row0=[100, 7, 2**32 - 4], **how),
    "base rows": lambda **how: make([4, 7], [6, 5, 8, 3], [-1, 0, -1, 1], **how),
    "only base rows": lambda **how: make([4], [9], [-1], **how),
    "no bias": lambda **how: make([4, 7], [6, 5], [0, 1], bias=False, **how),
    "wide": lambda **how: make([16, 8], [37, 90], [0, 1], d_in=320, d_out=272, **how),
    "strided rows of x": _strided_rows,
    "transposed x": _transposed_x,
    "transposed weight": _transposed_weight,
    "contiguous B": _contiguous_b,
    "batched x": _batched_x,
    "odd widths, misaligned x": _misaligned,
}
