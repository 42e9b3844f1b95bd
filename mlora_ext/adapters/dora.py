"""DoRA (Liu et al., "DoRA: Weight-decomposed low-rank adaptation", arXiv:2402.09353), as PEFT has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError
from ..frozen.row_norms import row_norms
from .kind import LayerSpec, ParameterSpec
from .lora import Lora
from .lora_config import check_config

if TYPE_CHECKING:
    from ..frozen.weight import FrozenWeight


class Dora(Lora):
    """`W' = m (W + scaling B A) / ‖W + scaling B A‖` (Eq. 5), the norm of each row a constant (section 4.3).

    `lora_magnitude_vector [O]` is m. In training, dropout also drops the input of the base product that the
    factor scales: see `AdapterKind.drops_base_input`.
    """

    name = "dora"
    parameter_names = ("lora_A", "lora_B", "lora_magnitude_vector")
    divides_by_norm = True
    drops_base_input = True
    merges = True

    def serves(self, config: Any) -> bool:
        """Whether the config is a `peft.LoraConfig` with `use_dora`."""
        return super().serves(config) and bool(config.use_dora)

    def check(self, name: str, config: Any) -> None:
        """Refuses settings that are not supported; see `AdapterKind.check`."""
        if config.lora_bias:
            raise AdapterError(
                name, "lora_bias=True is not supported with use_dora=True; PEFT refuses it, too"
            )
        check_config(name, config, "use_dora")

    def parameters(self, rank: int, d_in: int, d_out: int) -> dict[str, ParameterSpec]:
        own = super().parameters(rank, d_in, d_out)
        return {**own, "lora_magnitude_vector": ParameterSpec(1, d_out, flat=True)}

    def initialise(
        self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int, frozen: FrozenWeight
    ) -> None:
        """Draws A and B as LoRA does; the magnitudes are the norms of the rows of `W + scaling B A`."""
        super().initialise(own, config, spec, seed, frozen)
        (norms,) = row_norms(frozen, [(*self.factors(own, spec), spec.scaling)])
        with torch.no_grad():
            own["lora_magnitude_vector"].copy_(norms)

    def output_scale(self, own: Mapping[str, Tensor], spec: LayerSpec) -> Tensor | None:
        return own["lora_magnitude_vector"]

    def peft_key(self, parameter: str) -> str:
        """Returns PEFT's key; it writes the magnitudes without `.weight`."""
        return parameter if parameter == "lora_magnitude_vector" else super().peft_key(parameter)
