"""The config with which a run goes on: its own, with overrides that change no step that was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.config.config_file import apply_override, resolve_config
from mlora.config.faults import by_name, path_of
from mlora.config.run_config import RunConfig
from mlora.config.strict import Location, shown
from mlora.config.yaml_file import read_yaml
from mlora.errors import RunError
from mlora.store.run_folder import RunFolder

_INTERVALS = ("logging_steps", "save_steps")
FREE = {
    ("base_model",),
    ("output_dir",),
    ("device",),
    ("gradient_checkpointing",),
    ("base_gemm",),
    ("pack_base",),
    ("offload",),
    ("save_total_limit",),
    ("data_cache",),
    ("dataset_num_proc",),
    *((key,) for key in ("report_to", "run_name", "project", "logging_dir")),
    ("pipeline",),
    ("scheduler",),
    *(("defaults", key) for key in _INTERVALS),
    *(("adapters", "NAME", key) for key in (*_INTERVALS, "priority")),
    *(("sweep", "adapter", key) for key in (*_INTERVALS, "priority")),
    ("sweep", "places"),
    ("sweep", "trials"),
}
"""Keys that may change before a resume, with all below them: none changes results by more than rounding.

The folder of ``base_model`` may have moved; its digest must be the same.
"""
STEPS = {("adapters", "NAME", "max_steps"), ("defaults", "max_steps")}
"""Keys that may be raised before a resume; see `mlora.run.resumed`."""


def resumed_config(folder: RunFolder, settings: Sequence[str] = ()) -> RunConfig:
    """Returns a run's config with overrides, as ``mlora resume --set`` gives them.

    With another number of stages, the cut into stages is measured anew. RunError if the config is wrong, or
    an override is of a key that may not change.
    """
    # the folder of a base that has moved is not where the config says
    config = folder.read_config([each for each in settings if each.startswith("base_model=")])
    if not settings:
        return config
    data = read_yaml(folder.config)
    given = {apply_override(data, setting): f"--set {setting}" for setting in settings}
    given |= _default_steps(config, data, given)
    for location, name in list(given.items()):
        if location == ("defaults", "max_steps"):
            continue
        if location == ("output_dir",):
            raise RunError(f"{name}: move the run's folder instead, and resume it there")
        if location[0] == "defaults" and config.adapters:
            own = location[-1]
            raise RunError(f"{name}: each adapter has its own {own} by now; set adapters.NAME.{own}")
    if ("pipeline", "stages") in given and ("pipeline", "partition") not in given:
        data["pipeline"]["partition"] = None
    changed = resolve_config(data, folder=folder.path, where=str(folder.config), given=given)
    changed = changed.model_copy(update={"output_dir": config.output_dir})
    if key := changed_key(config.model_dump(), changed.model_dump()):
        hidden = "adapters" if config.sweep else "sweep"
        free = [".".join(keys) for keys in sorted(FREE) if keys[0] not in (hidden, "defaults", "output_dir")]
        if key.endswith("max_steps") and not config.sweep:
            raise RunError(f"--set: {key} can only be raised once a run has begun")
        raise RunError(
            f"--set: {key} cannot change once a run has begun, only {', '.join(free)}, and a larger "
            "adapters.NAME.max_steps; start a new run, with init_from to go on from an adapter"
        )
    return changed


def _default_steps(
    config: RunConfig, data: dict[str, Any], given: dict[Location, str]
) -> dict[Location, str]:
    """Gives an overridden ``defaults.max_steps`` to the adapters that had the default; returns where."""
    setting = given.get(("defaults", "max_steps"))
    if setting is None or config.sweep:
        return {}
    before, now = config.defaults.max_steps, data["defaults"]["max_steps"]
    found: dict[Location, str] = {}
    for index, adapter in enumerate(config.adapters):
        place = ("adapters", index, "max_steps")
        if adapter.max_steps == before and place not in given:
            data["adapters"][index]["max_steps"] = now
            found[place] = setting
    if not found:
        raise RunError(f"{setting}: each adapter has its own max_steps; set adapters.NAME.max_steps")
    return found


def changed_key(before: Any, now: Any) -> str | None:
    """Returns the path of the first value of a config that differs and may not, or None."""
    return next((path_of(change.location) for change in _changes(before, now) if not change.free), None)


def changed_lines(before: Any, now: Any) -> list[str]:
    """Returns a line for each value of a config that differs and may."""
    return [
        f"{path_of(by_name(change.location, change.location, now))} is {shown(change.now)}; at the "
        f"checkpoint it was {shown(change.before)}"
        for change in _changes(before, now)
        if change.free and change.location != ("output_dir",)
    ]


@dataclass(frozen=True)
class _Change:
    """A value that differs, and whether it may."""

    location: Location
    free: bool
    before: Any
    now: Any


def _changes(before: Any, now: Any, location: Location = (), *, free: bool = False) -> Iterator[_Change]:
    key = tuple("NAME" if isinstance(part, int) else part for part in location)
    raised = isinstance(before, int) and isinstance(now, int) and now > max(before, 0)
    free = free or key in FREE or (key in STEPS and raised)
    if not location and now.get("sweep") and before["defaults"]["max_steps"] != now["defaults"]["max_steps"]:
        steps = (before["defaults"]["max_steps"], now["defaults"]["max_steps"])
        yield _Change(("defaults", "max_steps"), False, *steps)  # later trials would have others
    if isinstance(before, dict) and isinstance(now, dict):
        for part in {**before, **now}:
            yield from _changes(before.get(part), now.get(part), (*location, part), free=free)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            yield from _changes(*pair, (*location, index), free=free)
    elif before != now:
        yield _Change(location, free, before, now)
