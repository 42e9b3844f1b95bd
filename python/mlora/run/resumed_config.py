"""The config with which a run goes on: its own, with overrides that change no result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlora.config.config_file import apply_override, resolve_config
from mlora.config.run_config import AdapterConfig, RunConfig
from mlora.config.yaml_file import read_yaml
from mlora.errors import RunError
from mlora.files.run_folder import RunFolder

# keys that may change before a resume: none changes the results by more than rounding
FREE = {
    "output_dir",
    "device",
    "gradient_checkpointing",
    "base_gemm",
    "pack_base",
    "offload",
    "save_total_limit",
    "logging_steps",
    "save_steps",
    "pipeline",
    "scheduler",
    "priority",
    "places",
    "trials",
}


def resumed_config(folder: RunFolder, settings: Sequence[str] = ()) -> RunConfig:
    """Returns a run's config with overrides, as ``mlora resume --set`` gives them.

    With another number of stages, the cut into stages is measured anew. RunError if the config is wrong, or
    an override is of a key that may not change.
    """
    config = folder.read_config()
    if not settings:
        return config
    data = read_yaml(folder.config)
    given = {apply_override(data, setting): f"--set {setting}" for setting in settings}
    for location, name in given.items():
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
        of_adapters = sorted(FREE & AdapterConfig.model_fields.keys())
        top = sorted((FREE & RunConfig.model_fields.keys()) - {"output_dir"})
        free = ", ".join([*top, *(f"adapters.NAME.{key}" for key in of_adapters)])
        raise RunError(
            f"--set: {key} cannot change once a run has begun, only {free}; start a new run, with init_from "
            "to go on from an adapter"
        )
    return changed


def changed_key(before: Any, now: Any, path: str = "") -> str | None:
    """Returns the path of the first value, outside the keys `FREE`, that differs, or None."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            found = changed_key(before.get(key), now.get(key), f"{path}.{key}" if path else key)
            if found and key not in FREE:
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return next((found for i, (a, b) in pairs if (found := changed_key(a, b, f"{path}[{i}]"))), None)
    return None if before == now else path
