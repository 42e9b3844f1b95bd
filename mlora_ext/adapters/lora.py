"""LoRA (Hu et al., 2021) as PEFT has it, with rank-stabilised scaling and patterns of ranks and alphas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .kind import AdapterKind, LayerSpec, ParameterSpec
from .lora_config import changes_base, check_config, init_kind, needs_weights
from .peft_start import start_values

if TYPE_CHECKING:
    from ..frozen.weight import FrozenWeight


class Lora(AdapterKind):
    """`scaling · drop(x) Aᵀ Bᵀ` with `lora_A [R, D]` and `lora_B [O, R]`."""

    name = "lora"
    parameter_names: tuple[str, ...] = ("lora_A", "lora_B")

    def serves(self, config: Any) -> bool:
        """Whether the config is a plain `peft.LoraConfig`, not a subclass, and leaves the base as it is."""
        from peft import LoraConfig

        return type(config) is LoraConfig and not changes_base(config)

    def check(self, name: str, config: Any) -> None:
        """Refuses settings that are not supported; see `AdapterKind.check`."""
        check_config(name, config)

    def parameters(self, rank: int, d_in: int, d_out: int) -> dict[str, ParameterSpec]:
        return {"lora_A": ParameterSpec(rank, d_in), "lora_B": ParameterSpec(rank, d_out, transposed=True)}

    def initialise(
        self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int, frozen: FrozenWeight
    ) -> None:
        """Draws PEFT's initial values on the CPU in fp32: the same on any device and in any dtype.

        Those of EVA need data: see `mlora_ext.initialise_from_data`. LoftQ's replace these in quantised
        layers: see `mlora_ext.initialise_from_weights`.
        """
        a, b, how = own["lora_A"], own["lora_B"], init_kind(config)
        if how == "eva":
            return
        if how == "orthogonal":
            set_values(
                own, start_values(torch.empty(b.shape[0], a.shape[1], device="cpu"), config, spec, seed)
            )
            return
        generator = torch.Generator("cpu").manual_seed(seed)
        values = torch.empty(a.shape, dtype=torch.float32, device="cpu")
        if how == "gaussian":
            nn.init.normal_(values, std=1 / spec.rank, generator=generator)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        with torch.no_grad():
            a.copy_(values)
            if how is False:
                bound = 1 / math.sqrt(b.shape[1])
                values = torch.empty(b.shape, dtype=torch.float32, device="cpu")
                b.copy_(values.uniform_(-bound, bound, generator=generator))

    def exported_config(self, config: Any) -> Any:
        """Returns the config without LoftQ, with which PEFT would quantise the base anew."""
        if needs_weights(config):
            config.init_lora_weights, config.loftq_config = True, {}
        return config


@torch.no_grad()
def set_values(own: Mapping[str, nn.Parameter], values: Mapping[str, torch.Tensor]) -> None:
    """Copies values into Parameters of these names."""
    for name, value in values.items():
        own[name].copy_(value)
