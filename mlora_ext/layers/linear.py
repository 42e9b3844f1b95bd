"""A frozen linear layer with the low-rank parts of many adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..adapters.kind import LayerSpec, ParameterSpec
from ..adapters.registry import adapter_kind
from ..backends.selection import chosen_backend
from ..frozen.base_gemm import frozen_linear
from ..frozen.plain import PlainWeight
from ..frozen.quantized.families import (
    base_bias,
    base_weight,
    family_of,
    frozen_weight_of,
    held_numbers,
    is_library_layer,
)
from ..frozen.weight import FrozenWeight
from ..ops.autograd import lora_linear_held
from ..ops.functional import lora_linear_rows, scaling_dtype
from ..ops.held import HeldAdapters, hold
from ..routing.route import LayerGroup, RoutePlan, RouteTensors
from ..routing.router import Router
from .adapter_layer import AdapterLayer, LayerPlace
from .bank import AdapterBank
from .kept_norms import KeptNorms
from .mixed_kinds import MixedLayer, mixed_output
from .over_module import OverModule
from .own_bases import with_own_bases

# Computes `x @ W.T`, the same result as nn.Linear.
_FALCON = "transformers.models.falcon.modeling_falcon.FalconLinear"


class MultiLoRALinear(MixedLayer):
    """`y = x W^T + b + scaling_i drop_i(x) A_i^T B_i^T` for the rows of adapter i (mLoRA, Eq. 2).

    Replaces an `nn.Linear` or GPT-2's `Conv1D`. `weight` and `bias` keep their names, so that a base
    checkpoint still loads. The router knows which rows belong to which adapter: see `mlora_ext.route`.
    Dropout applies in training mode only.

    Args:
        weight: `[d_out, d_in]`, or `[d_in, d_out]` if `fan_in_fan_out`; frozen here.
        bias: `[d_out]` or None; frozen here.
        router: shared by all layers of the model.
        name: of the layer in the model, for messages.
        index: of the layer in the whole model; dropout masks depend on it.
        fan_in_fan_out: whether `weight` is stored transposed, as in Conv1D.
        adapter_dtype: dtype of the adapters' Parameters.
    """

    layer: Tensor

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        router: Router,
        name: str,
        index: int,
        fan_in_fan_out: bool = False,
        adapter_dtype: torch.dtype = torch.float32,
    ) -> None:
        group = LayerGroup((), (), (), weight.device, scaling_dtype(weight.dtype))
        super().__init__(router=router, name=name, index=index, adapter_dtype=adapter_dtype, group=group)
        self.weight = weight.requires_grad_(False)
        self.bias = None if bias is None else bias.requires_grad_(False)
        self.fan_in_fan_out = fan_in_fan_out
        self.in_features, self.out_features = weight.shape if fan_in_fan_out else reversed(weight.shape)
        self.frozen = PlainWeight(self)
        self.eager_dims: set[int] = set()
        self.norms = KeptNorms()
        place: dict[str, Any] = {"device": weight.device, "dtype": adapter_dtype}
        self.lora_A = AdapterBank(self.in_features, transposed=False, **place)
        self.lora_B = AdapterBank(self.out_features, transposed=True, **place)
        self.register_buffer("layer", torch.tensor(index, device=weight.device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.layer
        super()._apply(fn, recurse)
        if self.layer is not before and not self.layer.is_meta:
            # `to_empty` has left it undefined, and no state dict restores it.
            self.layer.fill_(self.index)
        return self

    def take(self, name: str) -> None:
        super().take(name)
        self.norms.forget(name)

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        return isinstance(module, cls) or is_plain_linear(module)

    @classmethod
    def of(cls, module: nn.Module, place: LayerPlace) -> Self:
        numbers = held_numbers(module)
        assert numbers is not None
        layer = cls(
            base_weight(module, place.dtype),  # type: ignore[arg-type]
            base_bias(module, place.dtype),
            router=place.router,
            name=place.name,
            index=place.index,
            fan_in_fan_out=is_transposed(module),
            adapter_dtype=place.adapter_dtype(numbers),
        )
        if family_of(module) is not None:
            layer.frozen = frozen_weight_of(module, layer, place.dtype)
        elif place.router.frozen_kind is not None:
            layer.frozen = place.router.frozen_kind(layer)
        return layer

    @classmethod
    def shapes(cls, module: nn.Module, spec: LayerSpec) -> dict[str, ParameterSpec]:
        return adapter_kind(spec.kind).parameters(spec.rank, *features(module))

    def plain(self) -> nn.Module:
        from transformers.pytorch_utils import Conv1D

        d_in, d_out = self.in_features, self.out_features
        with torch.device("meta"):
            plain: Any = Conv1D(d_out, d_in) if self.fan_in_fan_out else nn.Linear(d_in, d_out)
        plain.weight, plain.bias = self.weight, self.bias
        for attribute in [key for key in plain.__dict__ if key.endswith("_hooks")]:
            plain.__dict__[attribute] = self.__dict__[attribute]
        plain.train(self.training)
        return plain

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to packed or batched rows.

        Args:
            x: `[..., d_in]`, the rows of the active route.

        Returns:
            `[..., d_out]`.

        Raises:
            ValueError: if no route says which adapter the rows belong to, or the route describes other rows.
            RuntimeError: if the compiled layer cannot serve this x, or another thread is inside a route.
        """
        if not self.group.adapters:
            return frozen_linear(x, self.frozen, self.bias)
        place, batch = None, 1
        if torch.compiler.is_compiling():
            active = self._compiled_tensors(x)
        elif self.router.observer is not None:  # a trial pass, which finds out where samples lie
            return self.router.observer.see(self.name, x, frozen_linear(x, self.frozen, self.bias))
        else:
            active, place, batch = self.router.tensors_for(self, x)
        names = active.names
        if not names:
            y = frozen_linear(x, self.frozen, self.bias)
            return y if active.observer is None else active.observer.see(self.name, x, y)
        if place is not None:
            x = place.samples_first(x, batch)
        elif (
            self.fused_projections is not None
            and (x.is_cuda or chosen_backend() == "cuda")
            and not torch.compiler.is_compiling()  # the compiled operator serves one layer
        ):
            shared = self.fused_projections.output(self, x, active)
            if shared is not None:
                return shared
        if self.own_bases and (own := [name for name in names if name in self.own_bases]):
            y = with_own_bases(self, own, x, active)
        else:
            y = self.added(x, active, self.frozen)
        return y if place is None else place.as_before(y)

    def _compiled_tensors(self, x: Tensor) -> RouteTensors:
        """Returns the active route's tensors inside a compiled graph, where nothing can be looked up."""
        active = self.group.active
        if active is None:
            raise RuntimeError("no route is active: call a compiled layer inside mlora_ext.route(...)")
        if x.numel() != active.rows_tensor.shape[0] * self.in_features:
            raise RuntimeError(
                f"layer {self.name}: x and the compiled model's input have different numbers of rows, as in "
                "an encoder-decoder; compile without fullgraph=True, or do not compile the model"
            )
        if x.dim() in self.eager_dims and active.mixed:
            raise RuntimeError(
                f"layer {self.name}: a compiled layer needs samples in the first dimension of x; do not "
                "compile it, or use one adapter for the whole batch"
            )
        return active

    def added(self, x: Tensor, active: RouteTensors, frozen: FrozenWeight) -> Tensor:
        """Returns the output over a frozen weight, with the low-rank parts of the route's adapters."""
        plan: RoutePlan
        if self.training and active.dropout_p is not None:
            plan = active.plan(self._buffers["layer"])
        else:
            plan = active.segments, active.scaling, None, None, None
        bias = self._parameters.get("bias")  # `nn.Module.__getattr__` is slow
        if not self.plain_kinds:
            return mixed_output(self, x, bias, active, plan, frozen)
        return self.operator_output(x, bias, active.names, plan, frozen)

    def operator_output(
        self, x: Tensor, bias: Tensor | None, names: tuple[str, ...], plan: RoutePlan, frozen: FrozenWeight
    ) -> Tensor:
        """Returns `[..., d_out]` for adapters whose A and B are `lora_A` and `lora_B`."""
        router, banks = self.router, self._modules
        if router.accumulates and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # The engine's way: tables of addresses, so that host time does not grow with the adapters.
            moves: int = router.moves + banks["lora_A"].moves + banks["lora_B"].moves  # type: ignore[assignment, operator, union-attr]
            held = self.held.get(names, moves, self._hold)
            ys = held and lora_linear_held(x, [frozen], [bias], held, plan, router.updates)
            if ys:
                return ys[0]
        lora_a, lora_b = self._matrices(names)
        return lora_linear_rows(x, frozen, bias, lora_a, lora_b, *plan)

    def _hold(self, names: tuple[str, ...]) -> HeldAdapters | None:
        return hold(names, *self._matrices(names), [self.written])

    def _matrices(self, names: tuple[str, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Returns A `[r, d_in]` and B `[d_out, r]` of these adapters."""
        bank_a, bank_b = self.lora_A, self.lora_B
        return [bank_a.parameter_of(name) for name in names], [bank_b.parameter_of(name) for name in names]

    def extra_repr(self) -> str:
        adapters = ", ".join(f"{name}: r={spec.rank}" for name, spec in self.specs.items())
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, adapters=({adapters})"
        )


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module that is not converted computes `x W^T + b`, with a plain or quantised weight."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, Conv1D) or is_library_layer(module) or _computes_as_linear(module)


def _computes_as_linear(module: nn.Module) -> bool:
    """Whether an nn.Linear subclass computes `x W^T + b` and holds only a plain weight and bias."""
    kind = type(module)
    if not isinstance(module, nn.Linear) or kind is NonDynamicallyQuantizableLinear:
        return False
    own = kind.forward is not nn.Linear.forward and f"{kind.__module__}.{kind.__qualname__}" != _FALCON
    state = {**module._parameters, **module._buffers, **module._modules}
    return not own and state.keys() == {"weight", "bias"} and type(state["weight"]) is nn.Parameter


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer stores its weight as `[d_in, d_out]`."""
    own = isinstance(module, nn.Linear) or is_library_layer(module)
    return bool(getattr(module, "fan_in_fan_out", not own))


def features(module: nn.Module) -> tuple[int, int]:
    """Returns d_in and d_out of a linear layer, converted or not."""
    if isinstance(module, OverModule):
        module = module.base
    if isinstance(module, AdapterLayer) or is_library_layer(module):
        return module.in_features, module.out_features  # type: ignore[return-value]
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)
