"""GPTQ (Frantar et al. 2022), as gptqmodel's layers hold it: integers of one input stand in a row.

`qweight [D bits / 32, O]` is packed along D, `qzeros [G, O bits / 32]` along O. The zeros are those that
Transformers makes of a checkpoint when it loads it, which are one larger than in files of format `gptq`.
"""

from __future__ import annotations

from torch import Tensor, nn

from .gptqmodel import WORD, GroupedWeight, fault_of_kernel, unpacked

_KERNELS = ("TorchLinear", "TorchAtenLinear", "TorchCpuAvx512Linear", "TorchFusedLinear", "TritonV2Linear")


class GptqWeight(GroupedWeight):
    """Integers of 2, 4 or 8 bits, packed along the inputs."""

    def _codes(self, inputs: slice, begin: int, end: int) -> Tensor:
        words = slice(inputs.start * self._bits // WORD, -(-inputs.stop * self._bits // WORD))
        found = unpacked(self._kept("packed")[words, begin:end], self._bits, 0)
        return found[: inputs.stop - inputs.start]


def fault(source: nn.Module) -> str | None:
    """Returns why a layer of gptqmodel cannot be taken over, or None."""
    return fault_of_kernel(source, _KERNELS, 'GPTQConfig(bits=..., backend="torch")')
