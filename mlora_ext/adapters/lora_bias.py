"""LoRA with a trained bias behind `lora_B`: PEFT's `lora_bias=True`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError
from .kind import LayerSpec, ParameterSpec
from .lora import Lora
from .lora_config import check_config

if TYPE_CHECKING:
    from ..frozen.weight import FrozenWeight


class LoraBias(Lora):
    """`scaling · (drop(x) Aᵀ Bᵀ + lora_bias)` with `lora_bias [O]`, which PEFT calls `lora_B.bias`."""

    name = "lora_bias"
    parameter_names = ("lora_A", "lora_B", "lora_bias")
    merges = True

    def serves(self, config: Any) -> bool:
        """Whether the config is a `peft.LoraConfig` with `lora_bias`."""
        return super().serves(config) and bool(config.lora_bias)

    def check(self, name: str, config: Any) -> None:
        """Refuses settings that are not supported; see `AdapterKind.check`."""
        check_config(name, config, "lora_bias")
        if config.init_lora_weights not in (True, False):
            raise AdapterError(
                name,
                f"lora_bias=True needs init_lora_weights=True or False, as in PEFT, got "
                f"{config.init_lora_weights!r}",
            )

    def parameters(self, rank: int, d_in: int, d_out: int) -> dict[str, ParameterSpec]:
        own = super().parameters(rank, d_in, d_out)
        return {**own, "lora_bias": ParameterSpec(1, d_out, flat=True)}

    def initialise(
        self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int, frozen: FrozenWeight
    ) -> None:
        """Draws PEFT's initial values; the bias is zero unless `init_lora_weights=False`."""
        super().initialise(own, config, spec, seed, frozen)
        if config.init_lora_weights is False:
            generator = torch.Generator("cpu").manual_seed(seed ^ 1)
            bound = 1 / math.sqrt(spec.rank)
            values = torch.empty(own["lora_bias"].shape, dtype=torch.float32, device="cpu")
            with torch.no_grad():
                own["lora_bias"].copy_(values.uniform_(-bound, bound, generator=generator))

    def low_rank_bias(self, own: Mapping[str, Tensor], spec: LayerSpec) -> Tensor | None:
        return own["lora_bias"]

    def peft_place(self, parameter: str) -> tuple[str, str]:
        return ("lora_B", "bias") if parameter == "lora_bias" else super().peft_place(parameter)
