"""Leading singular vectors of matrices that are decomposed whole, and of those that are not."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from scipy.sparse import linalg
from tolerances import assert_same_up_to_rounding
from torch import Tensor

from mlora_ext.start.from_weights import leading_svd


def rounding(rows: int, columns: int) -> Tensor:
    """What a quantisation loses: singular values that lie close together."""
    weight = torch.randn(rows, columns)
    return weight - (4 * weight).round() / 4


def product(found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    u, s, vh = found
    return (u * s) @ vh


MATRICES: dict[str, Any] = {
    "wide": lambda: rounding(520, 640),
    "tall": lambda: rounding(640, 520),
    "each value twice": lambda: torch.block_diag(*[rounding(300, 280)] * 2),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_large_matrices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as fp32 holds numbers, and the same bits again."""
    matrix = MATRICES[kind]()
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    monkeypatch.setattr(torch.linalg, "svd", None)
    count = 16
    found = leading_svd(matrix, count)
    assert [one.dtype for one in found] == [torch.float32] * 3
    assert_same_up_to_rounding(found[1].double(), s[:count], "singular values", 1e-6)
    assert_same_up_to_rounding(product(found).double(), product((u[:, :count], s[:count], vh[:count])), kind)
    identity = torch.eye(count)
    for vectors in (found[0].t(), found[2]):
        assert_same_up_to_rounding(vectors @ vectors.t(), identity, "orthonormal")
    for one, again in zip(found, leading_svd(matrix, count), strict=True):
        assert torch.equal(one, again)


def test_the_iteration_copies_no_matrix() -> None:
    """NumPy's arrays hold vectors; the matrix itself is there in fp64 once, as a tensor."""
    matrix = rounding(1024, 1024)
    leading_svd(matrix, 2)
    tracemalloc.start()
    try:
        leading_svd(matrix, 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * 8 * matrix.numel()


def test_a_matrix_of_a_lower_rank() -> None:
    matrix = torch.randn(600, 5) @ torch.randn(5, 520)
    found = leading_svd(matrix, 16)
    assert_same_up_to_rounding(product(found), matrix, "product")
    assert found[1][5:].amax() < 1e-5 * found[1][0]


@pytest.mark.parametrize(("rows", "columns", "count"), [(40, 64, 3), (64, 40, 50), (520, 640, 17)])
def test_others_are_decomposed_whole(rows: int, columns: int, count: int) -> None:
    """Small ones, and those of which many vectors are wanted; there are no more than the matrix has."""
    matrix = rounding(rows, columns)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    expected = u[:, :count], s[:count], vh[:count]
    for one, other in zip(leading_svd(matrix, count), expected, strict=True):
        assert torch.equal(one, other)


def test_an_iteration_that_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise linalg.ArpackNoConvergence("no convergence", [], [])

    monkeypatch.setattr(linalg, "svds", never)
    matrix = rounding(512, 512)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    for one, other in zip(leading_svd(matrix, 2), (u[:, :2], s[:2], vh[:2]), strict=True):
        assert torch.equal(one, other)
