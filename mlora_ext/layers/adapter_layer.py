"""A module of the base with adapters on it. To put adapters on other modules, write one class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..adapters.kind import LayerSpec, ParameterSpec, TensorSpec
from ..adapters.registry import adapter_kind
from ..frozen.weight import FrozenWeight
from ..ops.held import HeldByNames
from ..routing.route import LayerGroup, SharedInput
from ..routing.router import Router
from .bank import AdapterBank


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer stands.

    Attributes:
        router: shared by all layers of the model.
        name: of the layer in the model, for messages.
        index: of the layer in the whole model; dropout masks depend on it.
        autocast: whether adapters of a half-precision base are kept in fp32; see `convert_model`.
        dtype: of the model's activations; the weights of a quantised module have another one.
    """

    router: Router
    name: str
    index: int
    autocast: bool
    dtype: torch.dtype

    def adapter_dtype(self, weight: Tensor) -> torch.dtype:
        """Returns the adapters' dtype by PEFT's rule: fp32 for a half-precision base, else the base's dtype.

        It is fp32 on weights of bitsandbytes and gptqmodel, which are integers.
        """
        if not weight.is_floating_point():
            return torch.float32
        half = weight.dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if half and self.autocast else weight.dtype


class AdapterLayer(nn.Module):
    """Holds the Parameters of every adapter that sits on one module of the base.

    Adding, removing, saving, loading and training adapters use this interface only. A subclass replaces a
    module of the base and has a `forward`. It is one of `mlora_ext.layers.layer_kinds.LAYER_KINDS`.

    Args:
        router: shared by all layers of the model.
        name: of the layer in the model, for messages.
        index: of the layer in the whole model; dropout masks depend on it.
        adapter_dtype: dtype of the adapters' Parameters.
        group: for a layer without adapters.

    Attributes:
        served: names of the kinds of adapters that a class serves; None: those of the registry.
        frozen: what stays of the base's module.
        specs: the settings of each adapter on this layer, by name.
        group: layers with the same adapters and settings.
        plain_kinds: whether the operator uses all adapters' `lora_A` and `lora_B` as they are.
        own_bases: adapters that have a base of their own.
        written: adapters to whose gradients backward has added; see `mlora_ext.ops.held`.
    """

    served: tuple[str, ...] | None = None
    frozen: FrozenWeight

    def __init__(
        self, *, router: Router, name: str, index: int, adapter_dtype: torch.dtype, group: LayerGroup
    ) -> None:
        super().__init__()
        self.router, self.name, self.index = router, name, index
        self.adapter_dtype = adapter_dtype
        self.group = group
        self.specs: dict[str, LayerSpec] = {}
        self.plain_kinds = True
        self.own_bases: frozenset[str] = frozenset()
        self.written: set[str] = set()
        self.held = HeldByNames()
        self.fused_projections: SharedInput | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        hooks = getattr(value, "hooks", [value]) if name == "_hf_hook" else ()
        if any(getattr(hook, "offload", False) for hook in hooks):
            raise ValueError(
                f"layer {self.name}: accelerate's offloading does not serve layers with adapters, which it "
                "would put on the meta device; load the model again and leave out cpu_offload, "
                "disk_offload, and 'cpu' and 'disk' in dispatch_model's device_map"
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.frozen.moved()
        self.group = self.router.group_on(self.group, self.frozen)
        self.adapter_dtype = fn(torch.empty(0, dtype=self.adapter_dtype, device=self.frozen.device)).dtype
        return self

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Whether adapters can be put on a module with this class, or it is one of this class."""
        raise NotImplementedError

    @classmethod
    def of(cls, module: nn.Module, place: LayerPlace) -> Self:
        """Makes the layer that replaces a module of the base."""
        raise NotImplementedError

    @classmethod
    def shapes(
        cls, module: nn.Module, spec: LayerSpec
    ) -> Mapping[str, ParameterSpec] | Mapping[str, TensorSpec]:
        """Returns the Parameters that an adapter would have on a module, converted or not, by name."""
        raise NotImplementedError

    def plain(self) -> nn.Module:
        """Returns the base's module as it was, with the same tensors."""
        raise NotImplementedError

    def put(self, name: str, config: Any, spec: LayerSpec, seed: int) -> None:
        """Gives an adapter its Parameters here, with initial values where this process holds the layer.

        Args:
            name: of the adapter; not on the layer yet.
            config: the adapter's PEFT config.
            spec: the adapter's settings in this layer.
            seed: the seed of this adapter in this layer.
        """
        self.specs[name] = spec
        own = {}
        for part, shape in self.shapes(self, spec).items():
            assert isinstance(shape, ParameterSpec)
            own[part] = self.bank(part, shape).add(name, shape.rows)
            own[part].requires_grad_(shape.trained and not config.inference_mode)
        if not any(parameter.is_meta for parameter in own.values()):  # meta: another process's layer
            self.initialise(own, config, spec, seed)

    def initialise(self, own: Mapping[str, nn.Parameter], config: Any, spec: LayerSpec, seed: int) -> None:
        """Fills a new adapter's Parameters; see `AdapterKind.initialise`."""
        adapter_kind(spec.kind).initialise(own, config, spec, seed, self.frozen)

    def take(self, name: str) -> None:
        """Removes an adapter, also one that `put` has left incomplete; the others do not move."""
        self.held.forget()
        if self.fused_projections is not None:
            self.fused_projections.forget_adapters()
        for bank in self._modules.values():
            if isinstance(bank, AdapterBank) and name in bank:
                bank.remove(name)
        del self.specs[name]
        self.written.discard(name)

    def bank(self, part: str, spec: ParameterSpec) -> AdapterBank:
        """Returns the bank that holds the Parameters of this name; makes it if there is none."""
        if part not in self._modules:
            place: dict[str, Any] = {"device": self.frozen.device, "dtype": self.adapter_dtype}
            own = AdapterBank(spec.width, transposed=spec.transposed, flat=spec.flat, **place)
            self.add_module(part, own)
        bank = self._modules[part]
        assert isinstance(bank, AdapterBank)
        return bank

    def parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        """Returns an adapter's Parameters in this layer, by name."""
        names = adapter_kind(self.specs[name].kind).parameter_names
        return {part: self._modules[part].parameter_of(name) for part in names}  # type: ignore[union-attr, operator]

    @classmethod
    def buffer_shapes(cls, module: nn.Module) -> dict[str, TensorSpec]:
        """Returns what an adapter would have on a module beside Parameters, such as running statistics."""
        return {}

    def tensors_of(self, name: str) -> dict[str, Tensor]:
        """Returns what is saved of an adapter in this layer, by name: its Parameters and buffers."""
        return dict(self.parameters_of(name))

    def state_key(self, name: str, part: str) -> str:
        """Returns a Parameter's key in this layer's state dict."""
        return f"{part}.{name}.weight"

    @classmethod
    def peft_keys(cls, module: nn.Module, spec: LayerSpec) -> dict[str, str]:
        """Returns, by name of Parameter or buffer, the part of its PEFT key that follows the layer's name."""
        kind = adapter_kind(spec.kind)
        return {part: kind.peft_key(part) for part in kind.parameter_names}

    def exported(self, name: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns an adapter's tensors as a PEFT folder holds them; see `AdapterKind.exported`."""
        return adapter_kind(self.specs[name].kind).exported(own)

    def note_kinds(self) -> None:
        """Notes of which kinds the layer's adapters are, after one has come or gone."""
        kinds = {name: adapter_kind(spec.kind) for name, spec in self.specs.items()}
        self.plain_kinds = all(kind.is_plain for kind in kinds.values())
        self.own_bases = frozenset(name for name, kind in kinds.items() if kind.has_own_base)

    @property
    def scaling(self) -> Mapping[str, float]:
        """Scaling by adapter, as in PEFT's layers."""
        return {name: spec.scaling for name, spec in self.specs.items()}
