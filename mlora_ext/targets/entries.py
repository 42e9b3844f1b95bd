"""What the entries of an adapter's config match: which have no effect, and which name exactly its layers."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..adapters.kind import LayerSpec, one_by_one
from ..layers.adapter_weights import adapter_layers
from ..layers.embedding import warn_of_dropped_biases
from ..warn_caller import warn_caller
from .find import (
    Modules,
    base_modules,
    linear_names,
    matches,
    near_parameters,
    parameter_names,
    resolve,
    tied_to_embedding,
    translated,
)

if TYPE_CHECKING:
    from peft import LoraConfig


def idle_lines(model: nn.Module, config: LoraConfig, layers: Mapping[str, LayerSpec]) -> list[str]:
    """Returns a line about each entry that has no effect, such as `rank_pattern: 'q' applies to none of ...`.

    None about a pattern in `target_modules`, nor about entries that PEFT translates for the model's type, as
    `w1` of Mixtral.

    Args:
        model: converted or not.
        config: of an adapter.
        layers: the adapter's, by name.
    """
    modules = dict(base_modules(model))
    found = list(_idle(modules, config, layers))
    meant = translated(model, modules, "", config) if found else config
    return [f"{field}: {entry!r} {why}" for field, entry, why in found if entry in _entries(meant, field)]


def warn_of_entries(model: nn.Module, adapters: Mapping[str, LoraConfig]) -> None:
    """Warns of entries without effect in the configs of new adapters, and of what they train in vain."""
    for name, config in adapters.items():
        layers = {key: layer.specs[name] for key, layer in adapter_layers(model, name).items()}
        for line in idle_lines(model, config, layers):
            warn_caller(f"adapter {name!r}: {line}")
    warn_of_trained_parts(model, adapters)


def warn_of_trained_parts(model: nn.Module, adapters: Mapping[str, LoraConfig]) -> None:
    """Warns of what new adapters of a converted model train otherwise than PEFT, or in vain."""
    for name, config in adapters.items():
        warn_of_dropped_biases(model, name)
        if config.ensure_weight_tying and not tied_to_embedding(model, dict(base_modules(model)))[1]:
            warn_caller(
                f"adapter {name!r}: ensure_weight_tying changes nothing: no module of this model is tied to "
                "its input embedding"
            )


def _entries(config: LoraConfig, field: str) -> list[Any]:
    """Returns the entries of a field, sorted unless their order counts."""
    given = getattr(config, field)
    if given is None or isinstance(given, str | int):
        return [] if given is None else [given]
    return list(given) if isinstance(given, Mapping) else sorted(given)


def _idle(
    modules: Modules, config: LoraConfig, layers: Mapping[str, LayerSpec]
) -> Iterator[tuple[str, Any, str]]:
    """Yields field, entry and what is wrong with it."""
    from peft.utils.other import get_pattern_key

    known = linear_names(modules)
    for entry in () if isinstance(config.target_modules, str) else _entries(config, "target_modules"):
        if not _ends(modules, entry):
            near = difflib.get_close_matches(entry.rpartition(".")[2], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"linear layers: {', '.join(known)}"
            yield "target_modules", entry, f"matches nothing in the model; {hint}"
    parameters = parameter_names(modules)
    for entry in _entries(config, "target_parameters"):
        if not _ends(parameters, entry):
            near_one = near_parameters([entry], modules)
            yield "target_parameters", entry, f"matches nothing in the model{near_one}"
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = _entries(config, field)
        used = {get_pattern_key(patterns, key) for key in one_by_one(layers)} if patterns else ()
        for entry in patterns:
            if entry not in used:
                yield field, entry, "applies to none of the adapter's layers"
    excluded = config.exclude_modules
    for entry in _entries(config, "exclude_modules"):
        pattern = entry if isinstance(excluded, str) else rf"(.*\.)?{re.escape(entry)}"
        if not any(re.fullmatch(pattern, key) for key in modules):
            yield "exclude_modules", entry, "excludes nothing in the model"
    for entry in _entries(config, "layers_to_transform"):
        one = copy.copy(config)
        one.layers_to_transform = [entry]
        if not any(matches(one, key) for key in layers if f".{entry}." in key):
            yield "layers_to_transform", entry, "is the index of none of the adapter's layers"
    for entry in _entries(config, "layers_pattern"):
        if not any(re.match(rf"(?:.*?\.)?{entry}\.\d+\.", key) for key in layers):
            yield "layers_pattern", entry, "matches none of the adapter's layers"


def _ends(names: Any, entry: str) -> bool:
    return any(f".{name}".endswith(f".{entry}") for name in names)


def portable_targets(model: nn.Module, config: LoraConfig, layers: list[str]) -> dict[str, Any]:
    """Returns fields of a LoraConfig by which PEFT finds exactly these layers in the base model.

    Uses the last parts of the layers' names if they suffice, as people write them, else full names. Targets
    on parameters are those that PEFT translates the config's to.
    """
    base = dict(base_modules(model))
    resolved = resolve(model, base, "", config)
    if not resolved.target_parameters:
        return _portable_modules(base, config, layers)
    modules = [key for key in layers if matches(resolved, key)]
    fields = _portable_modules(base, resolved, modules) if modules else {"target_modules": []}
    names = ("rank_pattern", "alpha_pattern")
    parameters = {"target_parameters": sorted(resolved.target_parameters)}
    return fields | parameters | {name: getattr(resolved, name) for name in names}


def _portable_modules(base: Modules, config: LoraConfig, layers: list[str]) -> dict[str, Any]:
    wanted = set(layers)
    short = sorted({key.rpartition(".")[2] for key in layers})
    trial = copy.deepcopy(config)
    trial.target_modules = short
    if {key for key in base if matches(trial, key)} == wanted:
        return {"target_modules": short}
    return {
        "target_modules": sorted(layers),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
