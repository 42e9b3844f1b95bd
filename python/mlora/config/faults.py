"""Turns pydantic's errors about a config into lines: location, what was expected, what came."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from mlora.config.adapter_config import AdapterConfig
from mlora.config.aliases import known_as, other_tools
from mlora.config.dataset_config import DataFile, DatasetConfig
from mlora.config.lora_fields import CHOICES
from mlora.config.run_config import RunConfig
from mlora.config.sections import (
    LOAD_IN,
    OffloadConfig,
    PipelineConfig,
    QuantizationConfig,
    SchedulerConfig,
)
from mlora.config.strict import Location, shown
from mlora.config.sweep_config import SweepConfig
from mlora.config.training_fields import TrainingFields
from mlora.errors import literals, spelt_alike, unknown_value
from mlora.objectives.registry import objectives_with

MODELS: dict[str, type[BaseModel]] = {
    "defaults": TrainingFields,
    "adapters": AdapterConfig,
    "datasets": DatasetConfig,
    "scheduler": SchedulerConfig,
    "pipeline": PipelineConfig,
    "offload": OffloadConfig,
    "quantization": QuantizationConfig,
    "sweep": SweepConfig,
}

HOMES: dict[str, Sequence[str]] = {
    "under defaults or under an adapter": list(TrainingFields.model_fields),
    "at the top level of the config": list(RunConfig.model_fields),
    "under an adapter": list(AdapterConfig.model_fields),
    "under an adapter's lora": CHOICES,
    "under datasets": list(DatasetConfig.model_fields),
    "under scheduler": list(SchedulerConfig.model_fields),
    "under pipeline": list(PipelineConfig.model_fields),
    "under sweep": list(SweepConfig.model_fields),
    "under quantization": [key for key in QuantizationConfig.model_fields if key != "method"],
    # `base` and `optimizer` elsewhere are other tools' names of other keys
    "under offload": [key for key in OffloadConfig.model_fields if key not in ("base", "optimizer")],
}
"""The keys that belong to each part of a config. The first part that holds a key is named in errors."""

TRAINING = set(TrainingFields.model_fields)
OTHERWISE = {
    "scheduler": "did you mean 'lr_scheduler_type'?",
    "warmup_ratio": "did you mean 'warmup_steps'? A number below 1 is a ratio",
}
"""Hints for keys that mean something else among the training fields."""

MOST_LINES = 100
_KNOWN = "unknown key; known keys: "

EXPECTED = {
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list of entries that begin with '- '",
    "dict_type": "must be keys and values",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
}
"""What was expected, by the type of pydantic's error."""


def explain(
    error: ValidationError,
    data: Mapping[str, Any],
    where: str,
    given: Mapping[Location, str],
    moved: Callable[[Location], Location],
) -> list[str]:
    """Returns a line for each fault: ``run.yaml: adapters.b.lora.rank: unknown key; did you mean 'r'?``.

    After `MOST_LINES` lines, one more counts the other faults.

    `where`, `given` and `moved` mean the same as in `mlora.config.config_file.resolve_config`.
    """
    lines: list[str] = []
    faults = error.errors()
    places = {fault["loc"] for fault in faults}
    messages = set[str]()  # the list of known keys is told once
    unknown = set[Location]()  # samples of a sweep have the same keys with other values
    for index, fault in enumerate(faults):
        if len(lines) == MOST_LINES:
            more = len(faults) - index
            return [*dict.fromkeys(lines), f"{where}: {more} more fault{'s' * (more > 1)} beyond these lines"]
        location = moved(tuple(part for part in fault["loc"] if part != "[key]"))
        if not _comes_from_defaults(fault["loc"], data, places) and location not in unknown:
            unknown |= {location} if fault["type"] == "extra_forbidden" else set()
            message = _message(fault)
            if message.startswith(_KNOWN) and message in messages:
                message = "unknown key"
            messages.add(message)
            place = path_of(by_name(location, fault["loc"], data))
            parts = (_source(location, where, given), place, message)
            lines.append(": ".join(part for part in parts if part))
    return list(dict.fromkeys(lines))


def path_of(location: Sequence[Any]) -> str:
    """Returns a location as users write it: ``adapters[1].lora.r``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def by_name(location: Location, place: Location, data: Mapping[str, Any]) -> Location:
    """Returns a location with an item's name, if it has one, in place of its index, as for ``--set``.

    `place` is where the item is in `data`.
    """
    if len(location) < 2 or location[0] not in ("adapters", "datasets") or type(location[1]) is not int:
        return location
    names = [item.get("name") if isinstance(item, Mapping) else None for item in data[str(place[0])]]
    name = names[int(place[1])]
    plain = isinstance(name, str) and re.fullmatch(r"[\w+-]*[A-Za-z_][\w+-]*", name, re.ASCII)
    return (location[0], str(name), *location[2:]) if plain and names.count(name) == 1 else location


def _source(location: Location, where: str, given: Mapping[Location, str]) -> str:
    """Returns the override that set the value or, for an unknown key, something below it; else `where`."""
    for end in range(len(location), 0, -1):
        if location[:end] in given:
            return given[location[:end]]
    below = [name for at, name in given.items() if at[: len(location)] == location]
    return below[0] if below and location else where


def _comes_from_defaults(location: Location, data: Mapping[str, Any], places: Collection[Location]) -> bool:
    """Whether an adapter's fault lies in a value of ``defaults``, where it is reported, too."""
    if location[:1] != ("adapters",) or ("defaults", *location[2:]) not in places:
        return False
    return len(location) > 2 and location[2] not in data["adapters"][location[1]]


def _message(fault: Any) -> str:
    kind, value, location = fault["type"], fault["input"], fault["loc"]
    if kind == "extra_forbidden":
        model = MODELS.get(str(location[0]), RunConfig) if location[1:] else RunConfig
        model = DataFile if model is DatasetConfig and "path" in location[1:-1] else model
        in_lora = "lora" in location[1:-1]
        key = str(location[-1])
        known = CHOICES if in_lora else list(model.model_fields)
        return option_of_objective(key, value) or unknown_key(key, known)
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind == "invalid_key" or location[-1:] == ("[key]",):
        return f"a key must be text, got {shown(value)}; put it in quotes"
    if kind == "model_type":
        return f"must be keys and values{_some_keys(location)}, got {shown(value)}"
    if kind == "literal_error" and isinstance(value, str):
        return unknown_value(value, literals(fault), other_tools().values.get(str(location[-1])))
    bounds = {key: f"{bound:.15g}" for key, bound in fault.get("ctx", {}).items() if type(bound) is float}
    text = EXPECTED.get(kind, fault["msg"]).format(**(fault.get("ctx", {}) | bounds))
    return text if kind.endswith("too_short") else f"{text}, got {shown(value)}"


def _some_keys(location: Location) -> str:
    model = MODELS.get(str(location[0])) if location else None
    if model is None:
        return ""
    keys: list[str] = [
        key for key in ("name", "path", "format", "dataset", "lora") if key in model.model_fields
    ]
    keys += [key for key in model.model_fields if key not in keys]
    return f" ({', '.join(keys[:5])}{', …' if len(keys) > 5 else ''})"


def option_of_objective(key: str, value: Any) -> str | None:
    """Returns the message for an option of objectives that stands elsewhere, or None if it is none."""
    key = other_tools().options.get(key, key)
    names = objectives_with(key)
    if not names:
        return None
    others = f" (also {', '.join(names[1:])})" if names[1:] else ""
    shape = f"{{name: {names[0]}, {key}: {shown(value)}}}"
    return f"unknown key here; it belongs in objective: {shape}{others}"


def unknown_key(key: str, known: Sequence[str]) -> str:
    """Returns the message for an unknown key: which known key may be meant, or where the key belongs."""
    first, dot, rest = key.partition(".")
    if dot and first in known:
        return f"unknown key; keys are nested, not joined by dots: {first}: {{{rest}: ...}}"
    if key in OTHERWISE and set(known) >= TRAINING:
        return f"unknown key; {OTHERWISE[key]}"
    if key in other_tools().hints:
        return f"unknown key; {other_tools().hints[key]}"
    if key in LOAD_IN:
        return f"unknown key; write `quantization: {{method: {LOAD_IN[key]}}}` at the top level of the config"
    for home, keys in HOMES.items():
        if key in keys and key not in known:
            return f"unknown key here; it belongs {home}"
    here = known_as(key, known)
    elsewhere = _elsewhere(key, known_as) if here is None else None
    if key in other_tools().unsupported and not (here or elsewhere):
        return f"unknown key; {key} of Transformers' TrainingArguments is not supported"
    here = here or (None if elsewhere else spelt_alike(key, known))
    if here:
        return f"unknown key; did you mean {here!r}?"
    elsewhere = elsewhere or _elsewhere(key, partial(spelt_alike, alike=0.8))
    return elsewhere or f"{_KNOWN}{', '.join(known)}"


def _elsewhere(key: str, find: Callable[[str, Sequence[str]], str | None]) -> str | None:
    for home, keys in HOMES.items():
        found = find(key, keys)
        if found:
            return f"unknown key; did you mean {found!r}? It belongs {home}"
    return None
