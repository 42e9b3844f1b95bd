"""Optimizers that bitsandbytes computes: 8-bit AdamW (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2022), Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), paged states.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mlora.optim.optimizer import Optimizer, Shapes

BLOCK = 256
"""Elements that share a scale in an 8-bit state."""
SMALLEST_8BIT, SMALLEST_PAGED = 4096, 10**5
"""Elements from which on bitsandbytes keeps a state in 8 bits, and in pages."""


class BitsAndBytes(Optimizer):
    """An optimizer whose step is a kernel of bitsandbytes.

    State of a Parameter: its moments, fp32 or, from 4096 elements on, 8-bit codes (uint8) followed by the
    scale of each block of 256. Blocks run through a Parameter as PEFT stores it, contiguous.

    Attributes:
        kernel: bitsandbytes' name of the algorithm.
        bits: of the moments of Parameters of at least 4096 elements.
        moments: how many there are.
        paged: whether moments of at least 100,000 elements lie in memory that a GPU and the host share.
    """

    kernel, bits, moments, paged = "adam", 32, 2, False

    @classmethod
    def check(cls, name: str, device: torch.device) -> None:
        """Refuses a device without the kernel, and paged states on a CPU."""
        if cls.paged and device.type != "cuda":
            instead = name.removeprefix("paged_").replace("adamw_32bit", "adamw_torch_fused")
            raise ValueError(
                f"optim: {name!r} needs a GPU: bitsandbytes has no paged memory on {device}; use {instead}"
            )
        operator = "optimizer_update_8bit_blockwise" if cls.bits == 8 else "optimizer_update_32bit"
        import bitsandbytes

        key = "CUDA" if device.type == "cuda" else device.type.upper()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"bitsandbytes::{operator}", key):
            raise ValueError(
                f"optim: {name!r}: bitsandbytes {bitsandbytes.__version__} has no kernel for it on {device}; "
                "use adamw_torch_fused, or a newer bitsandbytes"
            )

    @classmethod
    def state_bytes(cls, shapes: Shapes) -> int:
        """Returns the bytes of all moments but paged ones, which leave the GPU when it needs room."""
        return sum(cls._state_bytes(math.prod(shape)) for shape in shapes)

    @classmethod
    def _state_bytes(cls, size: int) -> int:
        scales = 4 * cls.moments * -(-size // BLOCK) if cls._is_8bit(size) else 0
        if cls.paged and size >= SMALLEST_PAGED:
            return scales
        return scales + cls.moments * size * (1 if cls._is_8bit(size) else 4)

    @classmethod
    def step_bytes(cls, shapes: Shapes) -> int:
        """Returns seven fp32 copies of the largest Parameter: the most that a kernel for CPUs makes."""
        return 4 * 7 * max((math.prod(shape) for shape in shapes), default=0)

    @classmethod
    def _is_8bit(cls, size: int) -> bool:
        return cls.bits == 8 and size >= SMALLEST_8BIT

    def begin(self) -> None:
        """Makes moments of zeros before the first step."""
        if not any(self.state):
            self.state = [self._zeros(parameter) for parameter in self.parameters]

    def _zeros(self, parameter: Tensor) -> list[Tensor]:
        size, device = parameter.numel(), parameter.device
        dtype = torch.uint8 if self._is_8bit(size) else torch.float32
        moments = [self._moment(parameter, dtype) for _ in range(self.moments)]
        if dtype is torch.float32:
            return moments
        return moments + [torch.zeros(-(-size // BLOCK), device=device) for _ in range(self.moments)]

    def _moment(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.paged or parameter.numel() < SMALLEST_PAGED:
            return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        from bitsandbytes.functional import get_paged

        place = torch.device("cuda", parameter.device.index or 0)
        found: Tensor = get_paged(*parameter.shape, dtype=dtype, device=place)
        return found.zero_()

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        decay = self.weight_decay(index)
        for i, gradient in zip(index, gradients, strict=True):
            parameter = self.parameters[i]
            values = parameter.detach().contiguous()  # a copy of B, whose rows lie the other way
            settings = {"weight_decay": decay, "gnorm_scale": scale}
            self._kernel(i, gradient.contiguous(), values, steps + 1, learning_rate, settings)
            if values.data_ptr() == parameter.data_ptr():
                increment_version(parameter)
            else:
                parameter.copy_(values)
        if self.paged:  # the kernels read and write pages asynchronously
            torch.cuda.synchronize(self.parameters[index[0]].device)

    def _kernel(
        self, i: int, gradient: Tensor, values: Tensor, step: int, rate: float, settings: dict[str, Any]
    ) -> None:
        """Updates the moments of Parameter i and its `values`."""
        from bitsandbytes import functional

        config, state, two = self.config, self.state[i], self.moments == 2
        first, second = state[0], state[1] if two else None
        betas = {"beta1": config.adam_beta1, "beta2": config.adam_beta2}
        shared: Any = {"eps": config.adam_epsilon, "step": step, "lr": rate, **betas, **settings}
        if len(state) == self.moments:
            functional.optimizer_update_32bit(self.kernel, gradient, values, first, state2=second, **shared)
            return
        scales, codes = state[self.moments :], _codes(values.device)
        shared |= {"qmap1": codes[0], "qmap2": codes[1] if two else None, "beta3": 0.0, "alpha": 0.0}
        shared |= {"absmax1": scales[0], "absmax2": scales[1] if two else None}
        functional.optimizer_update_8bit_blockwise(self.kernel, gradient, values, first, second, **shared)


@functools.cache
def _codes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the 256 values of signed and of unsigned 8-bit codes."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map(signed=True).to(device), create_dynamic_map(signed=False).to(device)


class AdamW8bit(BitsAndBytes):
    """`adamw_bnb_8bit`, `adamw_8bit`: 2 bytes of state a weight in place of 8."""

    bits = 8


class PagedAdamW8bit(AdamW8bit):
    """`paged_adamw_8bit`."""

    paged = True


class PagedAdamW32bit(BitsAndBytes):
    """`paged_adamw_32bit`."""

    paged = True


class Lion(BitsAndBytes):
    """`lion_32bit`, `lion`: steps by the sign of a mixture of momentum and gradient; one moment."""

    kernel, moments = "lion", 1


class Lion8bit(Lion):
    """`lion_8bit`."""

    bits = 8


class PagedLion(Lion):
    """`paged_lion_32bit`."""

    paged = True


class PagedLion8bit(Lion8bit):
    """`paged_lion_8bit`."""

    paged = True
