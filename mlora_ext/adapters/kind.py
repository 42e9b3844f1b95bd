"""What an adapter is made of. A new kind of adapter is a class in one file: see `AdapterKind`.

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
    """What one adapter is in one layer.

    Attributes:
        rank: R.
        scaling: `alpha / r`, or `alpha / sqrt(r)`.
        dropout: probability, on the input of the low-rank part.
        kind: name of the adapter's kind.
    """

    rank: int
    scaling: float
    dropout: float
    kind: str = "lora"


@dataclass(frozen=True)
class ParameterSpec:
    """One of an adapter's Parameters in one layer: `[rows, width]`, stored row after row.

    Attributes:
        rows: how many.
        width: of each.
        transposed: whether the Parameter is the transposed view `[width, rows]`.
    """

    rows: int
    width: int
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The Parameter's shape."""
        return (self.width, self.rows) if self.transposed else (self.rows, self.width)


class AdapterKind(ABC):
    """A kind of adapter: its Parameters, and what the operator computes with them.

    The operator adds `scaling · drop(x) Aᵀ Bᵀ` to the rows of each adapter. A kind says what A and B are made
    of (`factors`), and may scale the outputs of its rows (`output_scale`), all differentiably. All kinds mix
    in one batch. `mlora_ext.adapters.registry.register_adapter_kind` makes a kind known.

    Attributes:
        name: of the kind.
        parameter_names: of its Parameters, as PEFT names them; no other kind's mean something else.

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
        """Whether an adapter with this config of PEFT's is of this kind."""

    @abstractmethod
    def check(self, name: str, config: Any) -> None:
        """Refuses what is not supported, field by field: nothing in a config is ignored.

        Args:
            name: of the adapter, for messages.
            config: one that `serves` accepted.

        Raises:
            ValueError: naming the adapter, the field and its value.
        """

    @abstractmethod
    def parameters(self, rank: int, d_in: int, d_out: int) -> dict[str, ParameterSpec]:
        """Returns the Parameters that an adapter has in a layer, by name."""

    @abstractmethod
    def initialise(
        self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int, frozen: FrozenWeight
    ) -> None:
        """Fills a new adapter's Parameters in one layer; they hold zeros.

        Args:
            own: by name; none is on the meta device.
            config: PEFT's.
            spec: of the layer.
            seed: of this adapter in this layer.
            frozen: the layer's weight.
        """

    def factors(self, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns A `[R, D]` and B `[O, R]`, by default the Parameters `lora_A` and `lora_B` themselves."""
        return own["lora_A"], own["lora_B"]

    def output_scale(self, own: Mapping[str, Tensor], frozen: FrozenWeight) -> Tensor | None:
        """Returns `[O]`, a factor on the outputs of the adapter's rows, bias aside; None: 1."""
        return None

    def peft_key(self, parameter: str) -> str:
        """Returns what follows the layer's name in PEFT's files."""
        return f"{parameter}.weight"

    @property
    def is_plain(self) -> bool:
        """Whether the operator takes the Parameters `lora_A` and `lora_B` as they are."""
        own = type(self)
        return own.factors is AdapterKind.factors and own.output_scale is AdapterKind.output_scale
