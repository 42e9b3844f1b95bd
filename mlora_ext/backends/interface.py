"""What a GPU backend serves: forward and backward of layers over tables of adapters, below autograd.

Letters: T rows, D = d_in, O = d_out of a layer, R largest rank, N adapters, L layers that share x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..frozen.plain import PlainWeight
from ..frozen.weight import FrozenWeight
from .factors import Factors
from .plan import Plan, PlanSizes

PLAN = ("segments", "scaling", "dropout_p", "dropout_rng", "layer")
"""Names of a plan's tensors, in the order of the operators' arguments; see docs/design.md."""
PHILOX_ROUNDS = 7
"""Of Philox4x32, which draws dropout masks: the fewest that pass all tests of BigCrush."""
PlanTensors = tuple[Tensor | None, ...]
Wanted = tuple[bool, bool, bool]
"""Whether dx, dA and dB are wanted."""
Saved = tuple[Tensor, ...]
"""What backward needs of forward beside x and the weights: s `[L, T, R, perhaps padded]`, and perhaps keep
bits."""


class Layer(NamedTuple):
    """One layer's frozen part.

    Attributes:
        frozen: W `[O, D]`.
        weight: W itself where it is a plain tensor; None: `frozen` makes the products.
        bias: `[O]`, or None.
        packed: on a CPU, the weight in oneDNN's layout for this direction, or None.
    """

    frozen: FrozenWeight
    weight: Tensor | None
    bias: Tensor | None = None
    packed: Tensor | None = None

    @property
    def product(self) -> FrozenWeight:
        """What makes the products: of the weight as it is given, if it is."""
        return self.frozen if self.weight is None else PlainWeight.of(self.weight)


class Adapters(NamedTuple):
    """A and B of the same adapters on every layer: all of the first layer, then of the second, and so on."""

    a: Factors
    b: Factors


class GpuOperator(Protocol):
    """One backend's forward and backward."""

    saves_masks: bool
    """Whether forward stores dropout masks for backward."""

    def forward(
        self, x: Tensor, layers: Sequence[Layer], adapters: Adapters, plan: PlanTensors, masks: bool = True
    ) -> tuple[list[Tensor], Saved]:
        """Returns `y [T, O]` of every layer, and what backward needs.

        Rows of x `[T, D]` may have any stride; their elements are dense. `masks`: whether backward can take
        the keep bits that `save_dropout_masks` asks for.
        """

    def backward(
        self,
        dys: Sequence[Tensor],
        x: Tensor,
        layers: Sequence[Layer],
        adapters: Adapters,
        saved: Saved,
        plan: PlanTensors,
        wanted: Wanted,
    ) -> Tensor | None:
        """Returns dx `[T, D]`, if it is wanted; gradients go to the memory that the tables tell of."""

    def plan(self, segments: Tensor, sizes: PlanSizes) -> Plan:
        """Returns the plan's tables on the device."""
