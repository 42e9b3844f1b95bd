"""The backend `triton`: kernels in Triton, compiled for the GPU at first use.

With the environment variable TRITON_INTERPRET=1, which Triton reads when this package is first imported, the
kernels run on CPU tensors.
"""

from .launch import INTERPRETED, Kernels

__all__ = ["INTERPRETED", "Kernels"]
