"""PEFT's LoRA layers of a model: checks them, and reads what is not in their configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.kind import AdapterKind
from ...adapters.registry import kind_for
from ..unconverted_state import MOVED, check_layer, check_untouched


@dataclass(frozen=True)
class PeftLayers:
    """PEFT's LoRA layers in a base model.

    Attributes:
        layers: `peft.tuners.lora.Linear`, or the outermost `ParamWrapper`, by the name of the module that it
            wraps.
        every: the same, and the wrappers inside of others, whose names end in `.base_layer`.
        configs: of the adapters, by name.
    """

    layers: Mapping[str, Any]
    every: Mapping[str, Any]
    configs: Mapping[str, Any]

    @classmethod
    def of(cls, base: nn.Module, configs: Mapping[str, Any]) -> PeftLayers:
        """Finds the layers and checks them.

        Raises ValueError, naming a layer, if it computes another kind of LoRA than its adapters' configs ask
        for, or has hooks or patches that would be lost.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        found: dict[str, Any] = {key: m for key, m in base.named_modules() if isinstance(m, kinds)}
        if not found:
            raise ValueError("peft_model: has no LoRA layers; were they unloaded or merged already?")
        for key, layer in found.items():
            _check_kind(key, layer, configs)
            _check_use(key, layer, configs)
            _check_parts(key, layer)
        inner = {id(layer.base_layer) for layer in found.values()}
        return cls({key: m for key, m in found.items() if id(m) not in inner}, found, configs)

    def bases(self) -> dict[str, nn.Module]:
        """Returns the wrapped layers by name."""
        return {key: layer.get_base_layer() for key, layer in self.layers.items()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the Parameters of all adapters."""
        for layer in self.every.values():
            for bank in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
                yield from bank.parameters()

    def parameters_of(self, name: str, key: str) -> dict[str, nn.Parameter]:
        """Returns an adapter's Parameters in one layer, by our names."""
        kind = self.kind(name)
        places = {part: kind.peft_place(part) for part in kind.parameter_names}
        return {
            f"{part_prefix(self.every[key])}{part}": getattr(
                getattr(self.every[key], modules)[name], attribute
            )
            for part, (modules, attribute) in places.items()
        }

    def kind(self, name: str) -> AdapterKind:
        """Returns an adapter's kind."""
        return kind_for(name, self.configs[name])

    def weights(self, name: str) -> dict[str, dict[str, Tensor]]:
        """Returns an adapter's `lora_A [r, d_in]`, `lora_B [d_out, r]` and so on, by layer name."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, layer in self.every.items():
            if name in layer.lora_A:
                own = {part: parameter.data for part, parameter in self.parameters_of(name, key).items()}
                found.setdefault(plain_key(key), {}).update(own)
        return found

    def scaling(self, name: str) -> dict[str, float]:
        """Returns an adapter's scaling by layer or parameter name, including changes by `set_scale`."""
        found = {}
        for key, layer in self.every.items():
            parameter = parameter_of(layer)
            whole = key if parameter is None else f"{plain_key(key)}.{parameter}"
            if name in layer.lora_A:
                found[whole] = layer.scaling[name]
        return found

    def dropout(self, name: str, default: float) -> float:
        """Returns an adapter's dropout probability; raises ValueError if its layers have several."""
        found = {
            getattr(layer.lora_dropout[name], "p", 0.0)
            for layer in self.every.values()
            if name in layer.lora_dropout
        }
        if len(found) > 1:
            raise ValueError(
                f"adapter {name!r}: its layers have lora_dropout of {', '.join(map(str, sorted(found)))}; "
                "use one value for all layers"
            )
        return found.pop() if found else default

    def drops(self, key: str) -> bool:
        """Whether a layer's adapters drop anything now."""
        return True in _dropping(self.layers[key])

    def mode(self, key: str) -> bool:
        """Whether a layer is in training mode; that of its dropouts, if any can drop."""
        dropping = _dropping(self.layers[key])
        return True in dropping if dropping else bool(self.layers[key].training)

    def trains(self, name: str, weight: nn.Parameter) -> bool:
        """Whether one Parameter of an adapter is trained.

        PEFT freezes inactive adapters and trains them once they are active. Here all adapters are active.
        """
        if weight.requires_grad:
            return True
        ours = {key: layer for key, layer in self.every.items() if name in layer.lora_A}
        waits = not any(name in layer.active_adapters for layer in ours.values())
        frozen = not any(p.requires_grad for key in ours for p in self.parameters_of(name, key).values())
        return waits and frozen and not self.configs[name].inference_mode

    def keep_dtype(self) -> bool:
        """Whether all adapters have the base's dtype; if not, a half-precision base keeps them in fp32."""
        return all(
            bank[name].weight.dtype == _base_weight(layer).dtype
            for layer in self.every.values()
            for bank in (layer.lora_A, layer.lora_B)
            for name in bank
        )


def plain_key(key: str) -> str:
    """Returns the name of the module that a wrapper, perhaps inside of others, wraps."""
    while key.endswith(".base_layer"):
        key = key.removesuffix(".base_layer")
    return key


def parameter_of(layer: Any) -> str | None:
    """Returns the name of the parameter that a PEFT layer adapts; None for a linear layer's weight."""
    name: str | None = getattr(layer, "parameter_name", None)
    return None if name == "weight" and isinstance(layer.get_base_layer(), nn.Linear) else name


def part_prefix(layer: Any) -> str:
    """Returns what stands before `lora_A` in the names of the Parameters that a PEFT layer becomes."""
    parameter = parameter_of(layer)
    return "" if parameter is None else f"{parameter}_"


def _base_weight(layer: Any) -> Tensor:
    base = layer.get_base_layer()
    found: Tensor = getattr(base, getattr(layer, "parameter_name", None) or "weight")
    return found


def _dropping(layer: Any) -> set[bool]:
    """Returns the training modes of those dropouts of a layer that can drop anything."""
    return {dropout.training for dropout in layer.lora_dropout.values() if getattr(dropout, "p", 0.0)}


_PLAIN_KINDS = {
    ("peft.tuners.lora.layer", "Linear"),
    ("peft.tuners.lora.layer", "ParamWrapper"),
    ("peft.tuners.lora.bnb", "Linear4bit"),
    ("peft.tuners.lora.bnb", "Linear8bitLt"),
    ("peft.tuners.lora.torchao", "TorchaoLoraLinear"),
}
"""PEFT's LoRA layers, by file and name; some are only defined where their package is installed."""


def _check_kind(key: str, layer: Any, configs: Mapping[str, Any]) -> None:
    from peft.tuners.lora.variants import DoraLinearVariant

    wanted = {name for name, config in configs.items() if config.use_dora and name in layer.lora_A}
    found = {name: type(variant) for name, variant in getattr(layer, "lora_variant", {}).items()}
    plain = (type(layer).__module__, type(layer).__name__) in _PLAIN_KINDS
    if not plain or found != dict.fromkeys(wanted, DoraLinearVariant):
        kinds = [variant.__name__ for variant in found.values()]
        raise ValueError(
            f"layer {key}: expected LoRA or DoRA on a linear layer (peft.tuners.lora.Linear), as the "
            f"adapters' configs say, got {', '.join(kinds) or type(layer).__qualname__}, which is not "
            "supported"
        )


def _check_use(key: str, layer: Any, configs: Mapping[str, Any]) -> None:
    """Raises ValueError if PEFT leaves adapters of a layer out, or only some of its dropouts train."""
    if layer.merged:
        raise ValueError(f"peft_model: adapters of {key} are merged into the base; call unmerge_adapter()")
    if layer.disable_adapters:
        raise ValueError(
            f"peft_model: adapters of {key} are disabled; call enable_adapter_layers() of a PEFT model, or "
            "enable_adapters() of a Transformers model"
        )
    for name in layer.lora_A:
        if name not in configs:
            raise ValueError(f"peft_model: layer {key} has an adapter {name!r} without a config")
        if len(configs) == 1 and name not in layer.active_adapters:
            raise ValueError(
                f"peft_model: adapter {name!r} is not active in {key}, but a converted model always uses its "
                f"only adapter; call set_adapter({name!r})"
            )
    if len(_dropping(layer)) > 1:
        raise ValueError(
            f"peft_model: some dropouts of {key} are in training mode and some are not; call the model's "
            "train() or eval()"
        )


def _check_parts(key: str, layer: Any) -> None:
    """Raises ValueError for hooks and patches within a layer; those on the layer itself move with it."""
    check_untouched(f"layer {key}", layer, MOVED)
    for part, module in layer.named_modules():
        if part and not part.startswith("base_layer"):
            check_untouched(f"layer {key}.{part}", module)
    for name, dropout in layer.lora_dropout.items():
        if type(dropout) not in (nn.Dropout, nn.Identity):
            raise ValueError(
                f"layer {key}: expected a Dropout for adapter {name!r}, got a {type(dropout).__name__}"
            )
    for bank in ("lora_A", "lora_B"):
        for name, module in getattr(layer, bank).items():
            check_layer(f"{key}.{bank}.{name}", module)
            for parameter in module.parameters():
                _check_weight(f"layer {key}.{bank}.{name}", parameter, _base_weight(layer))
    for name, module in layer.lora_magnitude_vector.items():
        _check_weight(f"layer {key}.lora_magnitude_vector.{name}", module.weight, _base_weight(layer))


def _check_weight(what: str, weight: nn.Parameter, base: Tensor) -> None:
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"{what}: its weight has hooks on its gradient, which conversion would discard; remove them, "
            "convert the model, and register them on mlora_ext.adapter_parameters(...)"
        )
    if weight.dtype == torch.float64 != base.dtype:
        raise ValueError(
            f"{what}: is fp64 on a base of {base.dtype}, and would be rounded; cast it to {base.dtype}"
        )
