"""Entries of an adapter's config that match nothing beside others that do: probably mistakes."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..adapters.kind import LayerSpec, one_by_one
from ..layers.adapter_weights import adapter_layers
from ..warn_caller import warn_caller
from .find import base_modules, linear_names, matches, translated
from .parameters import near_parameters

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
    found = list(_idle(model, config, layers))
    meant = translated(model, "", config) if found else config
    return [f"{field}: {entry!r} {why}" for field, entry, why in found if entry in _entries(meant, field)]


def warn_of_idle_targets(model: nn.Module, adapters: Mapping[str, LoraConfig]) -> None:
    """Warns of entries without effect in the configs of adapters that a model has."""
    for name, config in adapters.items():
        layers = {key: layer.specs[name] for key, layer in adapter_layers(model, name).items()}
        for line in idle_lines(model, config, layers):
            warn_caller(f"adapter {name!r}: {line}")


def _entries(config: LoraConfig, field: str) -> list[Any]:
    """Returns the entries of a field, sorted unless their order counts."""
    given = getattr(config, field)
    if given is None or isinstance(given, str | int):
        return [] if given is None else [given]
    return list(given) if isinstance(given, Mapping) else sorted(given)


def _idle(
    model: nn.Module, config: LoraConfig, layers: Mapping[str, LayerSpec]
) -> Iterator[tuple[str, Any, str]]:
    """Yields field, entry and what is wrong with it."""
    from peft.utils.other import get_pattern_key

    modules = dict(base_modules(model))
    known = linear_names(model)
    for entry in () if isinstance(config.target_modules, str) else _entries(config, "target_modules"):
        if not _ends(modules, entry):
            near = difflib.get_close_matches(entry.rpartition(".")[2], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"linear layers: {', '.join(known)}"
            yield "target_modules", entry, f"matches nothing in the model; {hint}"
    parameters = [
        f"{key}.{own}" for key, m in modules.items() for own, _ in m.named_parameters(recurse=False)
    ]
    for entry in _entries(config, "target_parameters"):
        if not _ends(parameters, entry):
            near_one = near_parameters([entry], modules.items())
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
