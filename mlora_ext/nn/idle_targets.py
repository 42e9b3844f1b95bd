"""Entries of `target_modules` that match nothing beside others that do: probably mistakes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from .targets import base_modules, linear_names, translated
from .warn_caller import warn_caller

if TYPE_CHECKING:
    from peft import LoraConfig


def idle_targets(model: nn.Module, config: LoraConfig) -> list[str]:
    """Returns the entries of a config's `target_modules` that no module of a model matches, sorted.

    None of a pattern, and none that PEFT translates for the model's type, as `w1` of Mixtral.
    """
    given = config.target_modules
    if given is None or isinstance(given, str):
        return []
    names = [f".{key}" for key, _ in base_modules(model)]
    idle = [entry for entry in sorted(given) if not any(name.endswith(f".{entry}") for name in names)]
    if not idle:
        return []
    meant = translated(model, "", config).target_modules or ()
    return [entry for entry in idle if entry in meant]


def warn_of_idle_targets(model: nn.Module, adapters: Mapping[str, LoraConfig]) -> None:
    """Warns of entries that match nothing, with the name of the layer that is spelt most alike."""
    for name, config in adapters.items():
        for entry in idle_targets(model, config):
            known = linear_names(model)
            near = difflib.get_close_matches(entry.rpartition(".")[2], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"linear layers: {', '.join(known)}"
            warn_caller(f"adapter {name!r}: target_modules: {entry!r} matches nothing in the model; {hint}")
