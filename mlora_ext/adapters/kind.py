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
        tokens: rows of an embedding or head that are trained, for `TRAINED_ROWS`.
        tied_to: name of the layer that holds the Parameters; empty: this layer does.
    """

    rank: int
    scaling: float
    dropout: float
    kind: str = "lora"
    tokens: tuple[int, ...] = ()
    tied_to: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """Size of one Parameter of an adapter that has memory of its own."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class ParameterSpec:
    """Size of one Parameter of an adapter in one layer: `[rows, width]`, stored row after row.

    Attributes:
        transposed: whether the Parameter is the transposed view `[width, rows]` of this storage.
    """

    rows: int
    width: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return (self.width, self.rows) if self.transposed else (self.rows, self.width)


class AdapterKind(ABC):
    """A kind of adapter: its Parameters, and how the operator's A and B are made of them.

    The operator adds `scaling · drop(x) Aᵀ Bᵀ` to the rows of each adapter. A kind returns A and B
    (`factors`) and may scale the outputs of its rows (`output_scale`). Both must be differentiable. Adapters
    of all kinds can share a batch. `mlora_ext.adapters.registry.register_adapter_kind` registers a kind.

    Attributes:
        name: the kind's name.
        parameter_names: names of its Parameters, as PEFT writes them. Two kinds may share a name only if it
            means the same in both.

    Example:
        >>> class FrozenA(Lora):
        ...     name = "frozen_a"
        ...     def initialise(self, own, config, spec, seed, frozen):
        ...         super().initialise(own, config, spec, seed, frozen)
        ...         own["lora_A"].requires_grad_(False)
    """

    name: str
    parameter_names: tuple[str, ...]

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

    def output_scale(self, own: Mapping[str, Tensor], spec: LayerSpec, frozen: FrozenWeight) -> Tensor | None:
        """Returns a factor `[O]` on the outputs of the adapter's rows (not on the bias), or None for none.

        Args:
            own: the Parameters by name.
            spec: the adapter's settings in this layer.
            frozen: the layer's frozen weight.
        """
        return None

    def peft_key(self, parameter: str) -> str:
        """Returns the part of a key in PEFT's files that follows the layer's name."""
        return f"{parameter}.weight"

    @property
    def is_plain(self) -> bool:
        """Whether the operator uses the Parameters `lora_A` and `lora_B` as they are."""
        own = type(self)
        return own.factors is AdapterKind.factors and own.output_scale is AdapterKind.output_scale
