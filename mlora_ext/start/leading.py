"""The leading singular vectors of a large matrix, without its other ones.

Letters: K = min(O, D), R vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SMALL, _PART = 512, 32
"""A matrix of a smaller K, or of fewer than so many K a vector, is decomposed whole: that is as fast."""


def leading_svd(matrix_OD: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the largest singular values and their vectors: `U [O, R]`, `s [R]` and `Vᵀ [R, D]`, fp32.

    R is `min(count, K)`. Of a large matrix and a small `count`, the implicitly restarted Lanczos iteration
    (Lehoucq, Sorensen and Yang 1998, "ARPACK Users' Guide") finds these vectors alone, in fp64 on the CPU, to
    the precision of fp64. There, singular values that lie close together leave the vectors of an fp32
    decomposition less exact. If the iteration does not converge, the whole matrix is decomposed.
    """
    least = min(matrix_OD.shape)
    if least >= _SMALL and count * _PART <= least:
        found = _searched(matrix_OD, count)
        if found is not None:
            return found
    u_OK, s_K, vh_KD = torch.linalg.svd(matrix_OD, full_matrices=False)
    return u_OK[:, :count], s_K[:count], vh_KD[:count]


def _searched(matrix_OD: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns what `leading_svd` does, or None if the iteration does not converge; always the same bits."""
    import numpy
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, svds

    begin = numpy.random.default_rng(0).standard_normal(min(matrix_OD.shape))
    matrix: Any = matrix_OD.cpu().double().numpy()
    # of the matrix itself SciPy makes a transposed copy
    products = LinearOperator(
        matrix.shape,
        dtype=matrix.dtype,
        matvec=matrix.__matmul__,
        rmatvec=matrix.T.__matmul__,
        matmat=matrix.__matmul__,
        rmatmat=matrix.T.__matmul__,
    )
    try:
        u, s, vh = svds(products, k=count, v0=begin)
    except ArpackNoConvergence:
        return None
    order = numpy.argsort(-s)
    found = (u[:, order], s[order], vh[order])
    return tuple(torch.from_numpy(one).to(matrix_OD) for one in found)  # type: ignore[return-value]
