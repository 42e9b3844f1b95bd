"""PEFT's layers of a model with LoRA adapters: checks them, and reads what is not in their configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.registry import kind_for
from ..errors import AdapterError
from ..frozen.quantized.families import held_numbers
from ..targets.refuse import MOVED, check_layer, check_module, check_untouched, is_weight


class PeftLayers:
    """PEFT's layers in a base model; raises ValueError, naming one, if conversion would lose something.

    That is a layer which computes another kind of LoRA than its adapters' configs ask for, or has hooks or
    patches inside.

    Args:
        base: a model with PEFT's layers in it.
        configs: of the adapters, by name.

    Attributes:
        layers: by the name of the module that each wraps: `Linear`, `Embedding` and the outermost
            `ParamWrapper` of `peft.tuners.lora`, `ModulesToSaveWrapper`, `TrainableTokensWrapper`.
        every: the same, and wrappers of parameters inside of others, whose names end in `.base_layer`.
    """

    def __init__(self, base: nn.Module, configs: Mapping[str, Any]) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        self.configs = configs
        self.every: dict[str, Any] = {}
        for key, module in base.named_modules():
            inside = any(key.startswith(f"{other}.") for other in self.every)
            if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and (
                not inside or plain_key(key) in self.every
            ):
                self.every[key] = module
        if not self.every:
            raise ValueError("peft_model: has no LoRA layers; were they unloaded or merged already?")
        self.layers = {key: layer for key, layer in self.every.items() if plain_key(key) == key}
        for key, layer in self.every.items():
            _check_kind(key, layer, configs)
            _check_use(key, layer, configs)
        for key, layer in self.every.items():
            check_untouched(f"layer {key}", layer, MOVED)
            for name in names_on(layer):
                for part, parameter in self.parameters_of(name, key).items():
                    _check_weight(f"layer {key}.{part}.{name}", parameter, _base_weight(layer))
            _check_parts(key, layer)

    def parameters(self) -> Iterator[tuple[str, str, str, nn.Parameter]]:
        """Yields a layer's name, an adapter's, that of its Parameter there, and the Parameter itself."""
        for key, layer in self.every.items():
            for name in names_on(layer):
                for part, parameter in self.parameters_of(name, key).items():
                    yield key, name, part, parameter

    def parameters_of(self, name: str, key: str) -> dict[str, nn.Parameter]:
        """Returns an adapter's Parameters in one layer, by the names that they have here."""
        layer = self.every[key]
        if name not in names_on(layer):
            return {}
        if hasattr(layer, "token_adapter"):
            rows = layer.token_adapter
            own = {} if rows.tied_adapter is not None else rows.trainable_tokens_delta
            return {"trainable_tokens_delta": own[name]} if own else {}
        if _is_wrapper(layer):
            return {} if self._is_tied(name, key) else dict(layer.modules_to_save[name].named_parameters())
        if name in layer.lora_embedding_A:
            return {part: getattr(layer, part)[name] for part in ("lora_embedding_A", "lora_embedding_B")}
        kind, parameter = kind_for(name, self.configs[name]), parameter_of(layer)
        prefix = "" if parameter is None else f"{parameter}_"
        places = {f"{prefix}{part}": kind.peft_place(part) for part in kind.parameter_names}
        return {part: getattr(getattr(layer, bank)[name], own) for part, (bank, own) in places.items()}

    def _is_tied(self, name: str, key: str) -> bool:
        """Whether an adapter's copy has the weight of its copy of an earlier layer."""
        copies = {
            other: getattr(layer.modules_to_save[name], "weight", None)
            for other, layer in self.every.items()
            if hasattr(layer, "modules_to_save") and name in layer.modules_to_save
        }
        own = copies[key]
        first = next(other for other, weight in copies.items() if weight is own)
        return own is not None and self.configs[name].ensure_weight_tying and first != key

    def weights(self, name: str) -> dict[str, dict[str, Tensor]]:
        """Returns an adapter's weights by layer name and Parameter name, such as `lora_A`."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, layer in self.every.items():
            own: dict[str, Tensor] = {p: weight.data for p, weight in self.parameters_of(name, key).items()}
            if hasattr(layer, "modules_to_save") and name in layer.modules_to_save:
                copied = layer.modules_to_save[name]
                kept = copied.state_dict()
                own |= {part: buffer for part, buffer in copied.named_buffers() if part in kept}
            if own:
                found.setdefault(plain_key(key), {}).update(own)
        return found

    def scaling(self, name: str) -> dict[str, float]:
        """Returns an adapter's scaling by layer or parameter name, including changes by `set_scale`."""
        found = {}
        for key, layer in self.every.items():
            if not _is_wrapper(layer) and name in layer.scaling:
                parameter = parameter_of(layer)
                whole = key if parameter is None else f"{plain_key(key)}.{parameter}"
                found[whole] = layer.scaling[name]
        return found

    def dropout(self, name: str, default: float) -> float:
        """Returns an adapter's dropout probability; raises ValueError if its layers have several."""
        found = {
            getattr(layer.lora_dropout[name], "p", 0.0)
            for layer in self.every.values()
            if name in getattr(layer, "lora_dropout", ())
        }
        if len(found) > 1:
            raise AdapterError(
                name,
                f"its layers have lora_dropout of {', '.join(map(str, sorted(found)))}; "
                "use one value for all layers",
            )
        return found.pop() if found else default

    def drops(self, key: str) -> bool:
        """Whether a layer's adapters drop anything now."""
        return True in _dropping(self.layers[key])

    def mode(self, key: str) -> bool:
        """Whether a layer is in training mode; that of its dropouts, if any can drop."""
        dropping = _dropping(self.layers[key])
        return True in dropping if dropping else bool(self.layers[key].training)

    def waiting(self) -> set[str]:
        """Returns the adapters that PEFT froze only because they are not active; here all adapters are."""
        training = {name for _, name, _, parameter in self.parameters() if parameter.requires_grad}
        active = {
            name for layer in self.every.values() for name in names_on(layer) if name in layer.active_adapters
        }
        return (
            {name for name, config in self.configs.items() if not config.inference_mode} - training - active
        )

    def keep_dtype(self) -> bool:
        """Whether all adapters have the base's dtype; if not, a half-precision base keeps them in fp32."""
        return all(
            parameter.dtype == _base_weight(self.every[key]).dtype
            for key, _, _, parameter in self.parameters()
        )


def plain_key(key: str) -> str:
    """Returns the name of the module that a wrapper, perhaps inside of others, wraps."""
    while key.endswith(".base_layer"):
        key = key.removesuffix(".base_layer")
    return key


def parameter_of(layer: Any) -> str | None:
    """Returns the name of the parameter that a PEFT layer adapts; None for a linear layer's weight."""
    name: str | None = getattr(layer, "parameter_name", None)
    return None if name is None or is_weight(layer.get_base_layer(), [name]) else name


def base_of(layer: Any) -> nn.Module:
    """Returns the base's module inside one of PEFT's layers."""
    found: nn.Module = layer.original_module if _is_wrapper(layer) else layer.get_base_layer()
    return found


def names_on(layer: Any) -> list[str]:
    """Returns the names of the adapters on one of PEFT's layers."""
    if _is_wrapper(layer):
        return sorted(layer._get_available_adapters())
    return [*layer.lora_A, *layer.lora_embedding_A]


def _base_weight(layer: Any) -> Tensor:
    base = base_of(layer)
    name = None if _is_wrapper(layer) else getattr(layer, "parameter_name", None)
    if name is None and (numbers := held_numbers(base)) is not None:
        return numbers
    found: Tensor = getattr(base, name) if name else next(base.parameters())
    return found


def _is_wrapper(layer: Any) -> bool:
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(layer, AuxiliaryTrainingWrapper)


def _dropping(layer: Any) -> set[bool]:
    """Returns the training modes of those dropouts of a layer that can drop anything."""
    dropouts = () if _is_wrapper(layer) else layer.lora_dropout.values()
    return {dropout.training for dropout in dropouts if getattr(dropout, "p", 0.0)}


_SERVED = {
    ("peft.tuners.lora.layer", "Linear"),
    ("peft.tuners.lora.layer", "Embedding"),
    ("peft.tuners.lora.layer", "ParamWrapper"),
    ("peft.tuners.lora.bnb", "Linear4bit"),
    ("peft.tuners.lora.bnb", "Linear8bitLt"),
    ("peft.tuners.lora.torchao", "TorchaoLoraLinear"),
    ("peft.tuners.lora.gptq", "GPTQLoraLinear"),
    ("peft.tuners.lora.awq", "AwqLoraLinear"),
    ("peft.utils.other", "ModulesToSaveWrapper"),
    ("peft.utils.other", "TrainableTokensWrapper"),
}
"""PEFT's layers, by file and name; some are only defined where their package is installed."""


def _check_kind(key: str, layer: Any, configs: Mapping[str, Any]) -> None:
    from peft.tuners.lora.variants import DoraLinearVariant

    low_rank = () if _is_wrapper(layer) else names_on(layer)
    wanted = {name for name in low_rank if name in configs and configs[name].use_dora}
    found = {name: type(variant) for name, variant in getattr(layer, "lora_variant", {}).items()}
    served = (type(layer).__module__, type(layer).__name__) in _SERVED
    if not served or found != dict.fromkeys(wanted, DoraLinearVariant):
        kinds = [variant.__name__ for variant in found.values()]
        raise ValueError(
            f"layer {key}: expected LoRA or DoRA on a linear layer (peft.tuners.lora.Linear), or LoRA on an "
            f"embedding, as the adapters' configs say, got {', '.join(kinds) or type(layer).__qualname__}, "
            "which is not supported"
        )


def _check_use(key: str, layer: Any, configs: Mapping[str, Any]) -> None:
    """Raises ValueError if PEFT leaves adapters of a layer out, or only some of its dropouts train."""
    tuner = getattr(layer, "token_adapter", layer)
    if tuner.__dict__.get("merged_adapters"):
        raise ValueError(f"peft_model: adapters of {key} are merged into the base; call unmerge_adapter()")
    if layer.disable_adapters:
        raise ValueError(
            f"peft_model: adapters of {key} are disabled; call enable_adapter_layers() of a PEFT model, or "
            "enable_adapters() of a Transformers model"
        )
    for name in names_on(layer):
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
    if _is_wrapper(layer):
        _check_wrapper(key, layer)
        return
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


def _check_wrapper(key: str, layer: Any) -> None:
    for name in names_on(layer) if hasattr(layer, "modules_to_save") else ():
        trained = layer.modules_to_save[name]
        if [type(part) for part in trained.modules()] != [type(part) for part in base_of(layer).modules()]:
            raise ValueError(
                f"layer {key}: adapter {name!r} has LoRA inside a module of modules_to_save, which is "
                "not supported"
            )
        check_module(f"{key}.modules_to_save.{name}", trained)


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
