"""The backend `triton`: kernels in Triton, compiled for the GPU at first use.

If TRITON_INTERPRET=1 is in the environment when this package is first imported, they run on CPU tensors.
"""

from .launch import INTERPRETED, Kernels

__all__ = ["INTERPRETED", "Kernels"]
