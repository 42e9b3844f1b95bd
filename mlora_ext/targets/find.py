"""Finds what an adapter sits on, by PEFT's rules, with its rank, scaling and dropout in each place.

That is layers (`target_modules`), parameters of modules (`target_parameters`), and modules of which it trains
copies (`modules_to_save`) or rows (`trainable_token_indices`).
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..adapters.kind import LayerSpec
from ..adapters.registry import kind_for
from ..adapters.trained_parts import (
    TRAINED_COPY,
    TRAINED_PARTS,
    TRAINED_ROWS,
    head_kind,
    task_heads,
    task_of,
    with_task_heads,
)
from ..errors import AdapterError
from ..frozen.quantized.families import is_gptqmodel
from ..layers.adapter_layer import AdapterLayer
from ..layers.copies import TaskHeads, why_not_copied
from ..layers.linear import MultiLoRALinear
from ..layers.over_module import OverModule
from .refuse import (
    check_parameters,
    check_patterns,
    check_rows,
    check_target,
    check_tied_copies,
    is_weight,
)

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

Modules = Mapping[str, nn.Module]
"""The base's modules by name, as `base_modules` yields them."""


def target_layers(model: nn.Module, name: str, config: LoraConfig) -> dict[str, LayerSpec]:
    """Returns the adapter's spec in each layer that PEFT would put it on, by name.

    First come layers with low-rank parts, then modules that it trains copies or rows of, both in the model's
    order. Raises ValueError if a name matches nothing, or a match cannot have such an adapter.
    """
    modules, kind = dict(base_modules(model)), kind_for(name, config).name
    resolved = resolve(model, modules, name, with_task_heads(config))
    parameters = _target_parameters(resolved, modules)
    layers: dict[str, LayerSpec] = {}
    for key, module in modules.items():
        targeted = matches(resolved, key)
        if targeted:
            check_target(model, name, resolved, key, is_linear(module))
            layers[key] = _layer_spec(resolved, key, kind)
        if key in parameters:
            if targeted:
                raise AdapterError(
                    name, f"{key} is in target_modules and its weight in target_parameters; keep one"
                )
            layers[key] = _parameters_spec(name, resolved, key, module, parameters[key], kind)
    if config.target_parameters and not parameters:
        wanted = sorted(config.target_parameters)
        hint = near_parameters(wanted, modules)
        raise AdapterError(name, f"target_parameters={wanted!r} match no parameter of this model{hint}")
    if not layers:
        raise AdapterError(name, _no_match(modules, config))
    embedding, tied = tied_to_embedding(model, modules)
    on_tied = [key for key in layers if key in (embedding, *tied)]
    if config.ensure_weight_tying and tied and on_tied:
        raise AdapterError(
            name,
            f"ensure_weight_tying is not supported for low-rank parts ({on_tied[0]} is in "
            "target_modules): PEFT gives the shared matrices two optimizer states, which both change them; "
            "leave it out, or use modules_to_save or trainable_token_indices",
        )
    copies = _copies(name, resolved, modules)
    copies |= _tied_copies(name, resolved, modules, copies, embedding, tied)
    rows = _rows(name, resolved, modules, embedding, tied)
    for key in rows:
        if key in copies:
            raise AdapterError(
                name, f"{key} is in modules_to_save and in trainable_token_indices; remove one of them"
            )
    for key in copies | rows:
        if key in layers:
            raise AdapterError(
                name,
                f"{key} is in target_modules and is trained itself (modules_to_save or "
                "trainable_token_indices); remove it from one of them",
            )
    return layers | copies | rows


def low_rank(layers: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Returns those of an adapter's layers that `target_modules` names."""
    return {key: one for key, one in layers.items() if one.kind not in TRAINED_PARTS}


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields all modules by name, except the model itself and what converted layers hold of adapters."""
    inside: tuple[str, ...] = ()
    for key, module in model.named_modules():
        if not key or key.startswith(inside or "."):
            continue
        yield key, module
        if isinstance(module, AdapterLayer):
            own = set(getattr(module, "base", nn.Module())._modules)
            inside = tuple(f"{key}.{part}" for part in module._modules if part not in own)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer that an adapter can be put on, converted or not."""
    return MultiLoRALinear.serves(module.base if isinstance(module, OverModule) else module)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all linear layers by name, converted or not; their positions are the layers' indices."""
    return {key: module for key, module in base_modules(model) if is_linear(module)}


def linear_names(modules: Modules) -> list[str]:
    """Returns the last parts of the linear layers' names, each once."""
    return list(dict.fromkeys(key.rpartition(".")[2] for key in modules if is_linear(modules[key])))


def matches(config: LoraConfig, key: str) -> bool:
    """Whether PEFT would put an adapter with this config on the module named `key`."""
    from peft.tuners.tuners_utils import check_target_module_exists

    return bool(check_target_module_exists(config, key))


def resolve(model: nn.Module, modules: Modules, name: str, config: LoraConfig) -> LoraConfig:
    """Returns a copy with PEFT's expansion of `all-linear` and of the model type's default targets."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS

    config = translated(model, modules, name, config)
    if _is_all_linear(config):
        config.target_modules = sorted(_all_linear(model, modules, config))
    if config.target_modules is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in DEFAULT_TARGETS and not config.target_parameters:
            raise AdapterError(
                name,
                "target_modules: expected names, a regular expression or 'all-linear': "
                f"PEFT has no default for model type {kind!r}",
            )
        config.target_modules = sorted(DEFAULT_TARGETS.get(kind or "", ()))
    return config


def translated(model: nn.Module, modules: Modules, name: str, config: LoraConfig) -> LoraConfig:
    """Returns a copy with PEFT's translation of layers that Transformers 5 has fused into parameters."""
    from peft.utils.transformers_weight_conversion import (
        convert_peft_config_for_transformers,
        get_model_conversion_mapping,
    )

    check_patterns(modules, name, config)
    translated, base = copy.deepcopy(config), cast("PreTrainedModel", model)
    if not hasattr(getattr(model, "config", None), "model_type"):
        return translated
    try:
        convert_peft_config_for_transformers(translated, base, get_model_conversion_mapping(base))
        if _is_all_linear(config) and not _is_all_linear(translated):
            # PEFT names the layers here; it does not know those that are converted
            hidden = copy.deepcopy(config)
            hidden.target_modules = [key.rpartition(".")[2] for key in _converted_linear(model, modules)]
            convert_peft_config_for_transformers(hidden, base, get_model_conversion_mapping(base))
            both = [*(translated.target_modules or ()), *(hidden.target_modules or ())]
            translated.target_modules = sorted(set(both))
    except ValueError as error:
        raise AdapterError(name, f"target_modules: {str(error).rstrip('.')}") from error
    return translated


def _is_all_linear(config: LoraConfig) -> bool:
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def _all_linear(model: nn.Module, modules: Modules, config: LoraConfig) -> set[str]:
    """Expands `all-linear` as PEFT does; also works on a model with converted layers.

    It includes layers of gptqmodel, which PEFT leaves out: it then finds no layer, and refuses.
    """
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    expanded: Any = _maybe_include_all_linear_layers(copy.deepcopy(config), model)
    return {key for key in expanded.target_modules if key in modules} | _converted_linear(model, modules)


def _converted_linear(model: nn.Module, modules: Modules) -> set[str]:
    """Returns the names of converted linear layers, and of gptqmodel's, except the output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        key
        for key, module in modules.items()
        if (isinstance(module, AdapterLayer) or is_gptqmodel(module))
        and is_linear(module)
        and module is not head
    }


def _layer_spec(config: LoraConfig, key: str, kind: str) -> LayerSpec:
    from peft.utils.other import get_pattern_key

    ranks, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = ranks.get(get_pattern_key(list(ranks), key), config.r)
    alpha = alphas.get(get_pattern_key(list(alphas), key), config.lora_alpha)
    scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
    return LayerSpec(rank, scaling, config.lora_dropout, kind)


def _no_match(modules: Modules, config: LoraConfig) -> str:
    """Returns the message for targets that match no layer, with a hint at names that are similar."""
    known, wanted = linear_names(modules), config.target_modules
    if isinstance(wanted, set):
        wanted = sorted(wanted)
    names = [wanted] if isinstance(wanted, str) else wanted or []
    near = [close for name in names for close in difflib.get_close_matches(name, known, n=1)]
    keys = ("exclude_modules", "layers_to_transform", "modules_to_save")
    others = [key for key in keys if getattr(config, key) is not None]
    beside = f" (with {', '.join(others)})" if others else ""
    wrong = [name for name in dict.fromkeys(near) if name not in names]
    hint = f"did you mean {', '.join(map(repr, wrong))}? " if wrong else ""
    if others and near and not wrong:
        left_out = " and ".join(f"{key}={getattr(config, key)}" for key in others)
        hint = f"without {left_out} they would; "
    spelt = isinstance(wanted, str) and wanted.lower() == "all-linear"
    if not spelt and difflib.get_close_matches(
        "all-linear", [name.lower() for name in names], n=1, cutoff=0.85
    ):
        alone = "" if isinstance(wanted, str) else ", not in a list"
        hint = f"did you mean 'all-linear'{alone}? "
    if isinstance(wanted, str) and wanted in known:
        hint = f"a string is a pattern for whole names; did you mean [{wanted!r}]? "
    return (
        f"target_modules={wanted!r}{beside} match nothing; {hint}"
        f"linear layers of this model: {', '.join(known) or 'none'}"
    )


def _target_parameters(config: LoraConfig, modules: Modules) -> dict[str, list[str]]:
    """Returns the names of targeted parameters of each module that has some, in the model's order.

    PEFT targets a parameter if its full name is given, or a last part of it after a dot. `config`: as
    `peft.utils.transformers_weight_conversion` has translated it.
    """
    wanted = set(config.target_parameters or ())
    found: dict[str, list[str]] = {}
    for key, module in modules.items() if wanted else ():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{key}.{name}"
            if full in wanted or any(full.endswith(f".{one}") for one in wanted):
                found.setdefault(key, []).append(name)
    return found


def near_parameters(names: Iterable[str], modules: Modules) -> str:
    """Returns the end of a message about names that match no parameter: those that are spelt most alike.

    A name is compared with as many last parts of each parameter's name as it has; empty if none is similar.
    """
    full = parameter_names(modules)
    near: dict[str, None] = {}
    for name in names:
        parts = name.count(".") + 1
        ends = dict.fromkeys(".".join(one.split(".")[-parts:]) for one in full)
        near |= dict.fromkeys(difflib.get_close_matches(name, list(ends), n=1))
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def parameter_names(modules: Modules) -> list[str]:
    """Returns the names of all parameters of the base."""
    return [f"{key}.{own}" for key, m in modules.items() for own, _ in m.named_parameters(recurse=False)]


def _parameters_spec(
    name: str, config: LoraConfig, key: str, module: nn.Module, names: list[str], kind: str
) -> LayerSpec:
    """Returns the settings on a module's parameters; patterns see each parameter's full name, as in PEFT."""
    ordered = check_parameters(name, config, key, module, names)
    specs = {one: _layer_spec(config, f"{key}.{one}", kind) for one in ordered}
    return specs["weight"] if is_weight(module, names) else LayerSpec.of_parameters(specs)


def _copies(name: str, config: LoraConfig, modules: Modules) -> dict[str, LayerSpec]:
    """Returns the spec for each module of `modules_to_save`; `config` has the heads of its task."""
    wanted = tuple(config.modules_to_save or ())
    found: dict[str, LayerSpec] = {}
    named = {key: module for key, module in modules.items() if key.endswith(wanted)}
    trained = [key for key, module in named.items() if next(module.parameters(), None) is not None]
    ends = tuple(one for one in wanted if any(key.endswith(one) for key in trained))
    for key, module in named.items():
        if any(key.startswith(f"{other}.") for other in found):
            continue
        if isinstance(module, TaskHeads):
            found[key] = _head(name, config)
            continue
        if key not in trained and key.endswith(ends):
            continue  # such as an Identity in the place of a norm
        if (reason := why_not_copied(module)) is not None:
            raise AdapterError(
                name,
                f"modules_to_save: {key} {reason}; only modules that act on single rows, "
                "such as heads and norms, or have convolutions or batch normalisation, can be trained per "
                "adapter",
            )
        found[key] = LayerSpec(0, 1.0, 0.0, TRAINED_COPY)
    heads = task_heads(config)
    for one in wanted:
        if one not in heads and not any(key.endswith(one) for key in found):
            short = list(dict.fromkeys(key.rpartition(".")[2] for key in modules))
            near = difflib.get_close_matches(one, short, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AdapterError(name, f"modules_to_save: {one!r} matches nothing in the model{hint}")
    if heads and not any(key.endswith(heads) for key in found):
        raise AdapterError(
            name,
            f"task_type={task_of(config)!r} trains a head named {' or '.join(heads)}, and the model "
            "has none; load it with its AutoModelFor... class, or leave task_type out",
        )
    return found


def _head(name: str, config: LoraConfig) -> LayerSpec:
    """Returns the spec of a head that the base lacks; a classifier's config has `num_labels`, too."""
    labels = 2 if task_of(config) == "QUESTION_ANS" else getattr(config, "num_labels", None)
    if labels is None:
        raise AdapterError(name, f"task_type={task_of(config)!r} needs num_labels")
    return LayerSpec(int(labels), 1.0, 0.0, head_kind(config))


def tied_to_embedding(model: nn.Module, modules: Modules) -> tuple[str, list[str]]:
    """Returns the names of the input embedding, and of modules whose weight is tied to it, by PEFT's rules.

    The first is empty if the model does not tell.
    """
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import _get_module_names_tied_with_embedding

    getter: Any = getattr(model, "get_input_embeddings", None)
    try:
        own = getter() if callable(getter) else None
    except NotImplementedError:  # models with several, such as CLIP
        own = None
    embedding = next((key for key, module in modules.items() if module is own), "")
    config: Any = BaseTuner.get_model_config(model)  # type: ignore[arg-type]
    if not embedding or not config.get("tie_word_embeddings", False):
        return embedding, []
    return embedding, [key for key in _get_module_names_tied_with_embedding(model) if key != embedding]


def _tied_copies(
    name: str, config: LoraConfig, modules: Modules, copies: Iterable[str], embedding: str, tied: list[str]
) -> dict[str, LayerSpec]:
    """Returns specs of the embedding and of what is tied to it, if an adapter keeps its copies tied.

    The embedding's copy holds the weight, and the others read it. `copies`: the names of the modules in
    `modules_to_save`.
    """
    wanted = [key for key in copies if any(f"{one}.".startswith(f"{key}.") for one in (embedding, *tied))]
    if not (config.ensure_weight_tying and tied and wanted):
        return {}
    check_tied_copies(name, config, modules, wanted, embedding, tied)
    own = LayerSpec(0, 1.0, 0.0, TRAINED_COPY)
    return {embedding: own} | dict.fromkeys(tied, replace(own, tied_to=embedding))


def _rows(
    name: str, config: LoraConfig, modules: Modules, embedding: str, tied: list[str]
) -> dict[str, LayerSpec]:
    """Returns the spec for each module of `trainable_token_indices`."""
    asked: Any = config.trainable_token_indices
    if asked is None:
        return {}
    if not isinstance(asked, dict):
        asked = {embedding or "embed_tokens": asked}
    targets: dict[str, list[int]] = {}
    for target, tokens in asked.items():
        keys = [key for key in modules if key.endswith(target)]
        if not keys:
            raise AdapterError(name, f"trainable_token_indices: {target!r} matches nothing in the model")
        targets |= {key: list(tokens) for key in keys}
    found = {
        key: LayerSpec(len(tokens), 1.0, 0.0, TRAINED_ROWS, tokens=tuple(tokens))
        for key, tokens in targets.items()
    }
    own = targets.get(embedding)
    if own is not None and all(targets.get(key, own) == own for key in tied):
        found |= dict.fromkeys(tied, replace(found[embedding], tied_to=embedding))
    elif config.ensure_weight_tying and any(key in targets for key in tied):
        raise AdapterError(
            name,
            "ensure_weight_tying: trainable_token_indices must name the same tokens for "
            f"{embedding} and {', '.join(tied)}",
        )
    for key, spec in found.items():
        check_rows(name, key, modules[key], spec)
    return found
