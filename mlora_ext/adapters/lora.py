"""LoRA as PEFT has it, and its kinds with more: a trained bias, DoRA, a start that changes the base.

Letters: D = d_in, O = d_out, R = rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import AdapterError
from ..frozen.row_norms import row_norms
from .kind import AdapterKind, LayerSpec, ParameterSpec
from .lora_config import changes_base, check_config, init_kind, needs_data, needs_weights
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
