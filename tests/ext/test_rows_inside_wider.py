"""Rows inside wider tensors: no 16-bit product of a CPU reads them, since some take in NaN from beside."""

import pytest
import torch
from backends import BACKENDS, fixture_of
from cases import Case, make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlora_ext.frozen import base_gemm as gemm
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.ops.functional import lora_linear_fused

OURS = (
    "base_linear", "base_linear_dx", "lora_linear", "lora_linear_backward", "cuda_forward", "cuda_backward",
)  # fmt: skip
PRODUCTS = {"mm", "addmm", "addmm_", "linear", *OURS}


backend = fixture_of(BACKENDS)


class Products(TorchDispatchMode):
    """Notes the storages that matrix products read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function._schema.name.partition("::")[2] in PRODUCTS:
            tensors = [one for one in tree_leaves(arguments) if isinstance(one, torch.Tensor)]
            self.read |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return function(*arguments, **(named or {}))

    def assert_none_of(self, *tensors: torch.Tensor) -> None:
        assert self.read, "the products were not seen"
        if tensors[0].device.type == "cpu":
            assert self.read.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in tensors)


def inside_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same rows with NaN before, behind and beside each."""
    wide = torch.full((tensor.shape[0] + 2, tensor.shape[1] + 24), torch.nan, dtype=tensor.dtype)
    return wide[1:-1, 8:-16].copy_(tensor.detach())


def case_of(rows: int, dtype: torch.dtype) -> Case:
    return make([5, 16], [rows, 0], [0, 1], dtype=dtype, d_in=72, d_out=88)


@pytest.mark.parametrize("rows", [1, 97])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_never_read_rows_inside_wider_tensors(dtype: torch.dtype, rows: int) -> None:
    case = case_of(rows, dtype)
    expected = case.run()
    case.x, case.dy = inside_nan(case.x), inside_nan(case.dy)
    case.require_grad()
    with Products() as products:
        found = case.run()
        gemm.linear(case.x, case.weight, case.bias)
        gemm.linear_dx(case.dy, case.weight)
    products.assert_none_of(case.x, case.dy)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", [one for one in BACKENDS if "cuda" in str(one)], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nor_do_those_of_layers_that_share_x(dtype: torch.dtype) -> None:
    case = case_of(97, dtype)
    frozen, plan = PlainWeight.of(case.weight), (*case.operator_arguments()[5:7], None, None, None)
    layers = [frozen] * 2, [case.bias] * 2, case.lora_a * 2, case.lora_b * 2
    results = []
    for wrap in (torch.Tensor.detach, inside_nan):
        x, dy = wrap(case.x).requires_grad_(), wrap(case.dy)
        with Products() as products:
            ys = lora_linear_fused(x, *layers, plan)
            results.append([*ys, *torch.autograd.grad(ys, x, [dy, dy])])
    products.assert_none_of(x, dy)
    assert all(map(torch.equal, *results))
