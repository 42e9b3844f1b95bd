"""A decorator for functions that `torch.compile` must call as they are.

`torch.compiler.disable` does the same, but imports the compiler at once, and that takes longer than
`import torch`.
"""

from torch._compile import _disable_dynamo as never_compiled

__all__ = ["never_compiled"]
