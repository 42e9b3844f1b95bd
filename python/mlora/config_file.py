"""A run's YAML: reading, overriding from the command line, explaining faults, writing the resolved copy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mlora.config import AdapterConfig, RunConfig, TrainingFields
from mlora.errors import RunError, first_line
from mlora.fields.dataset_config import DatasetConfig
from mlora.fields.lora_fields import nearest
from mlora.fields.pipeline_config import PipelineConfig
from mlora.fields.scheduler_config import SchedulerConfig
from mlora.fields.strict import KeyPathError
from mlora.fields.sweep_config import SweepConfig

MODELS: dict[str, type[BaseModel]] = {
    "defaults": TrainingFields,
    "adapters": AdapterConfig,
    "datasets": DatasetConfig,
    "scheduler": SchedulerConfig,
    "pipeline": PipelineConfig,
    "sweep": SweepConfig,
}


Location = tuple[int | str, ...]
INDEX = re.compile(r"^(adapters|datasets)\[(\d+)\]")


class _Loader(yaml.SafeLoader):
    """YAML that reads ``1e-4`` as a number, and refuses a key that stands twice and a date that is none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, KeyError, AttributeError) as error:
            kind, text = node.tag.rpartition(":")[2], str(node.value)
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{text if len(text) <= 60 else text[:59] + '…'} cannot be read as {kind}; "
                "put it in quotes if it is text",
                node.start_mark,
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen and key_node.value != "<<":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(path: Path, keys: str = "base_model and adapters") -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Args:
        path: the file.
        keys: some that it should hold, for the error where it holds something else.

    Returns:
        The mapping.

    Raises:
        RunError: the file cannot be read, is not YAML, or holds something else; with the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        of_run = path / "config.yaml"
        more = f"; the config of this run is {of_run}" if of_run.is_file() else ""
        raise RunError(f"{path}: cannot be read: {reason}{more}") from error
    return _parse(text, str(path), keys)


def _load(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("brackets are nested too deeply") from error


def _parse(text: str, where: str, keys: str) -> dict[str, Any]:
    try:
        data = _load(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RunError(f"{where}{line}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise RunError(f"{where}: {first_line(error)}") from error
    if not isinstance(data, dict):
        got = {type(None): "nothing", list: "a list"}.get(type(data), "a single value")
        raise RunError(f"{where}: must hold keys such as {keys}, got {got}")
    return data


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
    if not equals or not path.strip():
        raise RunError(f"--set {override}: must be key=value, for example --set defaults.max_steps=20")
    try:
        value = _load(text)
    except yaml.YAMLError as error:
        reason = getattr(error, "problem", None) or first_line(error)
        raise RunError(f"--set {override}: {text!r} is not YAML: {reason}") from error
    return _assign(data, INDEX.sub(r"\1.\2", path.strip()).split("."), value, override)


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
                f"--set {override}: nothing stands under {parts[0]!r}; the value there is {node!r}"
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
        raise RunError("\n".join(_explain(error, data, where, given or {}))) from error
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
            re.sub(r"adapters\[\d+\]\.?([\w.]*)", renamed, line) for line in _explain(error, whole, where, {})
        ]
        raise RunError("\n".join(dict.fromkeys(lines))) from error


def dump_config(config: RunConfig) -> str:
    """Return the resolved config as YAML that reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True, width=100)


def _explain(
    error: ValidationError, data: dict[str, Any], where: str, given: Mapping[Location, str]
) -> list[str]:
    lines = []
    for fault in error.errors():
        location = list(fault["loc"])
        if _comes_from_defaults(location, data):
            continue
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, KeyPathError):
            location += cause.key.split(".") if cause.key else []
        starts = (tuple(location[:end]) for end in range(len(location), 0, -1))
        source = next((given[start] for start in starts if start in given), where)
        lines.append(": ".join(part for part in (source, _path(location), _message(fault, location)) if part))
    return lines


def _comes_from_defaults(location: list[Any], data: dict[str, Any]) -> bool:
    if len(location) < 3 or location[0] != "adapters" or not isinstance(location[1], int):
        return False
    defaults, adapter = data.get("defaults"), data["adapters"][location[1]]
    return isinstance(defaults, dict) and location[2] in defaults and location[2] not in adapter


def _path(location: Sequence[Any]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _message(fault: Any, location: Sequence[Any]) -> str:
    kind, value = fault["type"], fault["input"]
    if kind == "extra_forbidden":
        return _unknown_key(
            str(location[-1]), MODELS.get(str(location[0]), RunConfig) if location[1:] else RunConfig
        )
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(fault["ctx"]["error"])
    if kind == "too_short":
        return "must not be empty"
    text = fault["msg"].replace("Input should be", "must be")
    if kind == "dict_type":
        text = "must be keys and values"
    if kind == "model_type":
        keys = list(MODELS[str(location[0])].model_fields) if location[0] in MODELS else []
        some = ", ".join(keys[:5]) + (", …" if len(keys) > 5 else "")
        text = f"must be keys and values ({some})" if keys else "must be keys and values"
    if kind == "literal_error":
        expected = re.findall(r"'([^']+)'", fault["msg"])
        return f"must be one of {', '.join(expected)}, got {value!r}"
    came = repr(value)
    return f"{text}, got {came if len(came) <= 60 else came[:59] + '…'}"


def _unknown_key(key: str, model: type[BaseModel]) -> str:
    if model is not AdapterConfig and key in TrainingFields.model_fields:
        return "unknown key here; it belongs under defaults or under an adapter"
    if model is not RunConfig and key in RunConfig.model_fields:
        return "unknown key here; it belongs at the top level of the config"
    if model is not AdapterConfig and key in AdapterConfig.model_fields:
        return "unknown key here; it belongs under an adapter"
    return f"unknown key; {nearest(key, list(model.model_fields))}"
