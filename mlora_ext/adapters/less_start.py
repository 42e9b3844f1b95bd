"""LoRA whose initialisation changes the base in PEFT: PiSSA, OLoRA, CorDA, LoRA-GA.

Letters: D = d_in, O = d_out, R = rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .kind import LayerSpec, ParameterSpec
from .lora import Lora, set_values
from .lora_config import changes_base, needs_data
from .peft_start import start_values

if TYPE_CHECKING:
    from ..frozen.weight import FrozenWeight


class LessStart(Lora):
    """`scaling · drop(x) Aᵀ Bᵀ` over the base `W - scaling · B0 A0`, where A0 and B0 are the initial A and B.

    PEFT subtracts the initial product from W. Here W is shared, so the adapter keeps A0 and B0 (`start_A`,
    `start_B`), which are never trained. PiSSA: Meng et al., 2024 (arXiv 2404.02948), Eq. 2-4; OLoRA:
    Büyükakyüz, 2024 (2406.01775); CorDA: Yang et al., 2024 (2406.05223); LoRA-GA: Wang et al., 2024
    (2407.05000).
    """

    name = "lora_less_start"
    parameter_names = ("lora_A", "lora_B", "start_A", "start_B")

    def serves(self, config: Any) -> bool:
        """Whether the config is a plain `peft.LoraConfig` with which PEFT changes the base."""
        from peft import LoraConfig

        return type(config) is LoraConfig and changes_base(config)

    def parameters(self, rank: int, d_in: int, d_out: int) -> dict[str, ParameterSpec]:
        return {
            **super().parameters(rank, d_in, d_out),
            "start_A": ParameterSpec(rank, d_in, trained=False),
            "start_B": ParameterSpec(rank, d_out, transposed=True, trained=False),
        }

    def initialise(
        self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int, frozen: FrozenWeight
    ) -> None:
        """Decomposes W in fp32. CorDA and LoRA-GA need data: see `mlora_ext.initialise_from_data`."""
        if not needs_data(config):
            set_values(own, with_start(start_values(frozen.dense(), config, spec, seed)))

    def fixed_factors(self, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return own["start_A"], own["start_B"]

    def exported(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns plain LoRA of rank 2 R: `A = [A; A0]` and `B = [B, -B0]`."""
        return {
            "lora_A": torch.cat([own["lora_A"], own["start_A"]]),
            "lora_B": torch.cat([own["lora_B"], -own["start_B"]], dim=1),
        }

    def exported_config(self, config: Any) -> Any:
        """Doubles ranks and adapts alphas so that scalings stay, as PEFT does in `save_pretrained`.

        PEFT refuses rank-stabilised scaling beside patterns there; here alphas in patterns are adapted, too.
        """
        more = math.sqrt(2) if config.use_rslora else 2
        config.r *= 2
        config.lora_alpha *= more
        config.rank_pattern = {key: 2 * rank for key, rank in (config.rank_pattern or {}).items()}
        config.alpha_pattern = {key: more * alpha for key, alpha in (config.alpha_pattern or {}).items()}
        config.init_lora_weights = True
        config.corda_config = config.lora_ga_config = None
        return config


def with_start(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns initial A and B as all four Parameters."""
    return {**values, "start_A": values["lora_A"], "start_B": values["lora_B"]}
