"""A run's YAML: reading, overriding from the command line, explaining faults, writing the resolved copy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mlora.config.faults import Location, explain, path_of
from mlora.config.run_config import RunConfig
from mlora.config.strict import shown
from mlora.config.sweep_config import SweepConfig
from mlora.config.yaml_file import YamlFault, load_yaml, read_yaml
from mlora.errors import RunError

INDEX = re.compile(r"^(adapters|datasets)\[(\d+)\]")


def apply_override(data: dict[str, Any], override: str) -> Location:
    """Apply an override ``a.b=c`` to a config's raw data, in place.

    A part of the path names a key of a mapping, an index of a list, or the ``name`` of a list's item. The
    value is read as YAML reads it.

    Args:
        data: the mapping of a YAML file.
        override: for example ``defaults.max_steps=20``, ``adapters.sums-r8.lora.r=4``,
            ``adapters[0].lora.target_modules=[q_proj]``.

    Returns:
        Where the value stands now: keys and indices.

    Raises:
        RunError: there is no ``=``, the path leads nowhere, or the value is not YAML.
    """
    path, equals, text = override.partition("=")
    parts = INDEX.sub(r"\1.\2", path.strip()).split(".")
    if not equals or not all(parts):
        raise RunError(f"--set {override}: must be key=value, for example --set defaults.max_steps=20")
    try:
        value = load_yaml(text)
    except YamlFault as error:
        raise RunError(f"--set {override}: {text!r} is not YAML: {error}") from error
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
                f"--set {override}: {parts[0]!r} leads nowhere: {path_of(location)} is {shown(node)}, "
                "which has no keys"
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
    known = ", ".join(str(name) for name in names)
    if not items:
        raise RunError(f"--set {override}: no item is named {parts[0]!r}; the list is empty")
    raise RunError(
        f"--set {override}: no item is named {parts[0]!r}; items: {known}, or 0 to {len(items) - 1}"
    )


def load_config(path: Path | str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read, override and resolve a run's YAML.

    Args:
        path: the YAML file; relative paths in it resolve against its folder.
        overrides: ``a.b=c`` texts, see :func:`apply_override`.

    Returns:
        The resolved config.

    Raises:
        RunError: one line for each fault, with the path of the key (``adapters[1].lora.rr``).
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
) -> RunConfig:
    """Resolve a config's raw data.

    Args:
        data: the mapping of a YAML file.
        folder: what relative paths resolve against.
        where: the name of the source in error lines.
        given: the name of another source by the location of what comes from there.

    Returns:
        The resolved config.

    Raises:
        RunError: one line for each fault.
    """
    try:
        config = RunConfig.model_validate(data, context={"folder": str(folder)})
    except ValidationError as error:
        raise RunError("\n".join(explain(error, data, where, given or {}))) from error
    if config.sweep is not None:
        _check_trials(config, config.sweep, where)
    return config


def _check_trials(config: RunConfig, sweep: SweepConfig, where: str) -> None:
    """Check the fields of a sweep's trials as if some of them stood in the config."""
    whole = config.with_samples()
    leaves = list(sweep.space)

    def renamed(match: re.Match[str]) -> str:
        path = match[1]
        searched = any(f"{path}.".startswith(f"{leaf}.") for leaf in leaves)
        return f"sweep.{'search' if searched else 'adapter'}{'.' if path else ''}{path}"

    try:
        RunConfig.model_validate(whole)
    except ValidationError as error:
        lines = [
            re.sub(r"adapters\[\d+\]\.?([\w.]*)", renamed, line) for line in explain(error, whole, where, {})
        ]
        raise RunError("\n".join(dict.fromkeys(lines))) from error


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as YAML that reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True, width=100)
