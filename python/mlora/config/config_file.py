"""A run's YAML: reads it, applies overrides, explains faults, and writes the resolved copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mlora.config.faults import explain, path_of
from mlora.config.run_config import RunConfig
from mlora.config.strict import Location, shown
from mlora.config.yaml_file import load_yaml, read_yaml
from mlora.errors import RunError, spelt_alike

INDEX = re.compile(r"^(adapters|datasets)\[(\d+)\]")


def apply_override(data: dict[str, Any], override: str) -> Location:
    """Applies an override ``a.b=c`` to a config's raw data, in place, and returns the value's location.

    Each part of the path is a key of a mapping, an index of a list, or the ``name`` of a list's item. The
    value is read as YAML. Examples: ``defaults.max_steps=20``, ``adapters.sums-r8.lora.r=4``,
    ``adapters[0].lora.target_modules=[q_proj]``.
    """
    path, equals, text = override.partition("=")
    parts = INDEX.sub(r"\1.\2", path.strip()).split(".")
    if not equals or not all(parts):
        raise RunError(f"--set {override}: must be key=value, for example --set defaults.max_steps=20")
    value = load_yaml(text, f"--set {override}: {text!r} is not YAML")
    return _assign(data, parts, value, override)


def _assign(node: Any, parts: Sequence[str], value: Any, override: str) -> Location:
    location: Location = ()
    while True:
        key: int | str
        if isinstance(node, list):
            key, used = _find(node, parts, override)
        elif isinstance(node, dict):
            key, used = parts[0], 1
            if len(parts) > 1 and node.get(key) is None:
                node[key] = {}
        else:
            raise RunError(
                f"--set {override}: {path_of(location)} is {shown(node)} and has no key {parts[0]!r}"
            )
        location += (key,)
        if used == len(parts):
            node[key] = value
            return location
        node, parts = node[key], parts[used:]


def _find(items: list[Any], parts: Sequence[str], override: str) -> tuple[int, int]:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    for used in range(len(parts), 0, -1):
        if ".".join(parts[:used]) in names:
            return names.index(".".join(parts[:used])), used
    if parts[0].isdecimal() and int(parts[0]) < len(items):
        return int(parts[0]), 1
    near = spelt_alike(parts[0], [str(name) for name in names if name is not None])
    if near:
        raise RunError(f"--set {override}: no item is named {parts[0]!r}; did you mean {near!r}?")
    known = f"items: {', '.join(map(str, names))}, or 0 to {len(items) - 1}" if items else "the list is empty"
    raise RunError(f"--set {override}: no item is named {parts[0]!r}; {known}")


def load_config(path: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a run's YAML, applies overrides and resolves it. Relative paths start at the file's folder.

    A RunError has one line for each fault, with the path of the key (``adapters.b.lora.rr``).
    """
    path = Path(path)
    data = read_yaml(path)
    given = {apply_override(data, override): f"--set {override}" for override in overrides}
    return resolve_config(data, folder=path.parent, where=str(path), given=given)


def resolve_config(
    data: dict[str, Any],
    *,
    folder: Path | str = ".",
    where: str = "config",
    given: Mapping[Location, str] | None = None,
    moved: Callable[[Location], Location] = lambda location: location,
) -> RunConfig:
    """Resolves a config's raw data; a RunError has one line for each fault.

    Args:
        folder: where relative paths start.
        where: the name of the source in error lines.
        given: names of other sources (overrides), by the location of the values that they set.
        moved: returns the location that error lines give for a location in `data`.
    """
    try:
        config = RunConfig.model_validate(data, context={"folder": str(folder)})
    except ValidationError as error:
        raise RunError("\n".join(explain(error, data, where, given or {}, moved))) from error
    if config.sweep is not None:
        space = config.sweep.space

        def in_sweep(location: Location) -> Location:
            if location[:1] != ("adapters",) or not location[1:]:
                return location
            searched = any(location[2 : 2 + len(leaf.keys)] == leaf.keys for leaf in space.values())
            return ("sweep", "search" if searched else "adapter", *location[2:])

        resolve_config(config.with_samples(), folder=folder, where=where, moved=in_sweep)
    return config


def dump_config(config: RunConfig) -> str:
    """Returns the resolved config as YAML that reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True, width=100)
