"""The backend `triton`: kernels in Triton, compiled for the GPU at first use.

If TRITON_INTERPRET=1 is in the environment when this package is first imported, they run on CPU tensors.
"""

from .operator import INTERPRETED, TritonOperator

__all__ = ["INTERPRETED", "TritonOperator"]
