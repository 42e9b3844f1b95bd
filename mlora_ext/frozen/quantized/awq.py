"""AWQ (Lin et al. 2023), as gptqmodel's layers hold it: integers of one output stand in a column.

`qweight [D, O bits / 32]` and `qzeros [G, O bits / 32]` are packed along O. Eight integers of 4 bits stand in
a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .gptqmodel import GroupedWeight, fault_of_kernel

_KERNELS = (
    "AwqTorchLinear",
    "TorchAtenAwqLinear",
    "TorchCpuAvx512AwqLinear",
    "TorchFusedAwqLinear",
    "AwqGEMMLinear",
    "AwqGEMMTritonLinear",
)


class AwqWeight(GroupedWeight):
    """Integers of 2, 4 or 8 bits, packed along the outputs."""

    order = (0, 4, 1, 5, 2, 6, 3, 7)

    def _codes(self, inputs: slice, begin: int, end: int) -> Tensor:
        return self._of_outputs("packed", begin, end, inputs)


def fault(source: nn.Module) -> str | None:
    """Returns why a layer of gptqmodel cannot be taken over, or None."""
    own: Any = source
    found = fault_of_kernel(source, _KERNELS, 'AwqConfig(backend="torch_awq")')
    if found is None and own.in_features % own.group_size:
        return f"its {own.in_features} inputs are not a multiple of its group_size, {own.group_size}"
    return found
