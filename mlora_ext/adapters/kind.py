"""The interface of a kind of adapter. To add a kind, write one class: see `AdapterKind`.

Letters: D = d_in, O = d_out, R = rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from ..frozen.weight import FrozenWeight


@dataclass(frozen=True)
class LayerSpec:
    """One adapter's settings in one layer.

    Attributes:
        scaling: `alpha / r`, or `alpha / sqrt(r)`.
        dropout: probability, on the input of the low-rank part.
        kind: the kind's name in the registry, or one of `mlora_ext.adapters.trained_parts`.
        parameters: for targets on parameters of a module (`target_parameters`), the settings of each by name;
            then `rank` is their sum, and `scaling` that of the first.
        tokens: rows of an embedding or head that are trained, for `TRAINED_ROWS`.
        tied_to: name of the layer that holds the Parameters; empty: this layer does.
    """

    rank: int
    scaling: float
    dropout: float
    kind: str = "lora"
    parameters: tuple[tuple[str, LayerSpec], ...] = ()
    tokens: tuple[int, ...] = ()
    tied_to: str = ""

    @classmethod
    def of_parameters(cls, parameters: Mapping[str, LayerSpec]) -> LayerSpec:
        """Returns the settings on these parameters of one module."""
        first = next(iter(parameters.values()))
        rank = sum(spec.rank for spec in parameters.values())
        return cls(rank, first.scaling, 0.0, first.kind, tuple(parameters.items()))


def one_by_one(plan: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Returns an adapter's settings by the name of each layer, and of each parameter that it sits on."""
    found: dict[str, LayerSpec] = {}
    for key, spec in plan.items():
        if spec.parameters:
            found |= {f"{key}.{parameter}": own for parameter, own in spec.parameters}
        else:
            found[key] = spec
    return found


@dataclass(frozen=True)
class TensorSpec:
    """Size of one Parameter of an adapter that has memory of its own."""

    shape: tuple[int, ...]
    trained: bool = True


@dataclass(frozen=True)
class ParameterSpec:
    """Size of one Parameter of an adapter in one layer: `[rows, width]`, stored row after row.

    Attributes:
        transposed: whether the Parameter is the transposed view `[width, rows]` of this storage.
        flat: whether the Parameter is the vector `[width]`, the only row of this storage.
        trained: whether it gets gradients and has optimizer states.
    """

    rows: int
    width: int
    transposed: bool = False
    flat: bool = False
    trained: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        if self.flat:
            return (self.width,)
        return (self.width, self.rows) if self.transposed else (self.rows, self.width)


class AdapterKind(ABC):
    """A kind of adapter: its Parameters, and how the operator's A and B are made of them.

    The rows of an adapter become

        y = b + c (x Wᵀ + scaling (drop(x) Aᵀ Bᵀ + e))

    A kind returns A and B (`factors`), and may return e (`low_rank_bias`) and c (`output_scale`). All must be
    differentiable. It may also have a base of its own, `W - scaling · B0 A0`, over the shared W
    (`fixed_factors`). Adapters of all kinds can share a batch.
    `mlora_ext.adapters.registry.register_adapter_kind` registers a kind.

    Attributes:
        name: the kind's name.
        parameter_names: names of its Parameters; all kinds give a name the same meaning.
        divides_by_norm: whether c is `output_scale` divided by the norm of each row of `W + scaling B A`. The
            norm counts as a constant in backward. A layer keeps it until A, B or W changes.
        drops_base_input: whether dropout also drops the input of the base product that c scales:
            `y = b + x Wᵀ + (c - 1) drop(x) Wᵀ + c scaling (drop(x) Aᵀ Bᵀ + e)`.
        merges: whether PEFT's own layers merge it, once `peft_place` has put its Parameters into them.

    Example:
        >>> class FrozenA(Lora):
        ...     name = "frozen_a"
        ...     def initialise(self, own, config, spec, seed, frozen):
        ...         super().initialise(own, config, spec, seed, frozen)
        ...         own["lora_A"].requires_grad_(False)
    """

    name: str
    parameter_names: tuple[str, ...]
    divides_by_norm: bool = False
    drops_base_input: bool = False
    merges: bool = False

    @abstractmethod
    def serves(self, config: Any) -> bool:
        """Whether an adapter with this PEFT config is of this kind."""

    @abstractmethod
    def check(self, name: str, config: Any) -> None:
        """Refuses every setting of a config that is not supported; no field is ignored.

        Args:
            name: the adapter's name, for messages.
            config: a config that `serves` accepted.

        Raises:
            ValueError: a field is not supported; names the adapter, the field and its value.
        """

    @abstractmethod
    def parameters(self, rank: int, d_in: int, d_out: int) -> dict[str, ParameterSpec]:
        """Returns the Parameters of an adapter in one layer, by name.

        Args:
            rank: R.
            d_in: D.
            d_out: O.
        """

    @abstractmethod
    def initialise(
        self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int, frozen: FrozenWeight
    ) -> None:
        """Fills a new adapter's Parameters in one layer. They hold zeros before.

        Args:
            own: the Parameters by name; none is on the meta device.
            config: the adapter's PEFT config.
            spec: the adapter's settings in this layer.
            seed: the seed of this adapter in this layer.
            frozen: the layer's frozen weight.
        """

    def factors(self, own: Mapping[str, Tensor], spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """Returns A `[R, D]` and B `[O, R]`. Default: the Parameters `lora_A` and `lora_B`.

        Args:
            own: the Parameters by name.
            spec: the adapter's settings in this layer.
        """
        return own["lora_A"], own["lora_B"]

    def output_scale(self, own: Mapping[str, Tensor], spec: LayerSpec) -> Tensor | None:
        """Returns a factor `[O]` on the outputs of the adapter's rows (not on the bias), or None for none.

        Return a Parameter as it is where you can: a layer computes with those of all adapters in one call.

        Args:
            own: the Parameters by name.
            spec: the adapter's settings in this layer.
        """
        return None

    def low_rank_bias(self, own: Mapping[str, Tensor], spec: LayerSpec) -> Tensor | None:
        """Returns a vector `[O]` that is added to `drop(x) Aᵀ Bᵀ`, or None for none; see `output_scale`."""
        return None

    def kept_bytes(self, d_out: int) -> int:
        """Returns the bytes that a layer keeps for the adapter beside its Parameters.

        Args:
            d_out: O.
        """
        return (4 + 8) * d_out if self.divides_by_norm else 0  # the norms, and the squares of those of W

    def peft_place(self, parameter: str) -> tuple[str, str]:
        """Returns where PEFT's layer holds a Parameter: a dict of modules by adapter, and an attribute."""
        return parameter, "weight"

    def fixed_factors(self, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns frozen A0 `[R, D]` and B0 `[O, R]`; the adapter's rows see `W - scaling · B0 A0` as base.

        Only a kind that overrides this has a base of its own.

        Args:
            own: the Parameters by name.
        """
        raise NotImplementedError

    def exported(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns an adapter's tensors in one layer as a PEFT folder holds them. Default: unchanged.

        Args:
            own: the Parameters' values by name.
        """
        return dict(own)

    def exported_config(self, config: Any) -> Any:
        """Returns the config of a PEFT folder that holds `exported` tensors. Default: the same config.

        Args:
            config: a copy of the adapter's PEFT config; may be changed.
        """
        return config

    def peft_key(self, parameter: str) -> str:
        """Returns the part of a key in PEFT's files that follows the layer's name."""
        return ".".join(self.peft_place(parameter))

    @property
    def has_own_factors(self) -> bool:
        """Whether A and B are not simply the Parameters `lora_A` and `lora_B`."""
        return type(self).factors is not AdapterKind.factors

    @property
    def is_plain(self) -> bool:
        """Whether the operator does all that the kind needs, with the Parameters `lora_A` and `lora_B`."""
        own = type(self)
        adds = own.output_scale, own.low_rank_bias
        return not self.has_own_factors and adds == (AdapterKind.output_scale, AdapterKind.low_rank_bias)

    @property
    def has_own_base(self) -> bool:
        """Whether its rows see another base than W; see `fixed_factors`."""
        return type(self).fixed_factors is not AdapterKind.fixed_factors
