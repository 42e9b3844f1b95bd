"""A task that is submitted to a run: an adapter as in the run's YAML, and its data."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlora.config.adapter_config import AdapterConfig
from mlora.config.config_file import resolve_config
from mlora.config.dataset_config import DatasetConfig, is_hub_dataset
from mlora.config.run_config import RunConfig
from mlora.config.strict import Location, shown
from mlora.config.sweep_config import is_trial
from mlora.config.yaml_file import read_yaml
from mlora.errors import RunError, first_fault, first_line


def read_submission(path: Path, config: RunConfig, taken: Collection[str]) -> dict[str, Any]:
    """Reads a task's YAML, checks it as part of a run, and returns its resolved adapter and datasets.

    The file holds what stands below ``adapters`` for one task, and ``datasets`` that the run does not have.
    The run's ``defaults`` fill in missing keys; paths are relative to the file. `taken` names all tasks that
    the run has had. Raises RunError if the file is wrong, its names are taken, or files that it names are
    missing.
    """
    data = read_yaml(path, "name, dataset and lora")
    if "adapters" in data:
        raise RunError(
            f"{path}: adapters: a task file describes one adapter; move its keys (name, dataset, lora) to "
            "the top level"
        )
    datasets = data.pop("datasets", [])
    if not isinstance(datasets, list):
        raise RunError(f"{path}: datasets: must be a list, got {shown(datasets)}")
    check_name(data.get("name"), taken, str(path))
    if config.sweep and is_trial(str(data.get("name"))):
        raise RunError(
            f"{path}: name: {data['name']} is reserved for the sweep's trials; choose another name"
        )
    resolved = _resolved(path, config, data, datasets)
    new = resolved.adapters[-1]
    used = {new.dataset, new.eval_dataset}
    known = [dataset for dataset in resolved.datasets if dataset.name in used]
    for dataset in known:
        for file in dataset.path:
            if not is_hub_dataset(file.path) and not os.path.exists(file.path):
                raise RunError(f"{path}: dataset {dataset.name!r}: {file.path} does not exist")
    if new.init_from is not None and not (Path(new.init_from) / "adapter_config.json").is_file():
        raise RunError(f"{path}: init_from: {new.init_from} has no adapter_config.json")
    return {"adapter": new.model_dump(), "datasets": [dataset.model_dump() for dataset in known]}


def check_name(name: Any, taken: Collection[str], where: str) -> None:
    """Checks that a name is free; names that differ by case only would share a folder on some disks."""
    for other in taken:
        if isinstance(name, str) and name.casefold() == other.casefold():
            case = "" if name == other else f", which differs from {name!r} only in case"
            raise RunError(f"{where}: name: the run already has a task {other!r}{case}; choose another name")


def _resolved(path: Path, config: RunConfig, data: dict[str, Any], datasets: list[Any]) -> RunConfig:
    """Returns the run's config with the task as its last adapter."""
    base = config.model_dump()
    for own in datasets:
        if isinstance(own, dict) and own.get("name") in [dataset["name"] for dataset in base["datasets"]]:
            raise RunError(
                f"{path}: datasets: the run already has a dataset {own['name']!r}; remove or rename this one"
            )
    base["sweep"] = None  # a sweep allows no other adapters
    whole = {**base, "adapters": [*base["adapters"], data], "datasets": [*base["datasets"], *datasets]}

    def in_file(location: Location) -> Location:
        match location:
            case ("adapters", _, *rest):
                return tuple(rest)
            case ("datasets", int(index), *rest):
                return ("datasets", index - len(base["datasets"]), *rest)
        return location

    return resolve_config(whole, folder=path.parent, where=str(path), moved=in_file)


def submitted(name: str, content: Mapping[str, Any]) -> tuple[AdapterConfig, list[DatasetConfig]]:
    """Returns a submission's adapter and datasets.

    Raises RunError if it is not of this version, or is a trial with values that no adapter may have.
    """
    try:
        adapter = AdapterConfig.model_validate(content["adapter"])
        datasets = [DatasetConfig.model_validate(entry) for entry in content["datasets"]]
    except (KeyError, ValueError) as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else first_line(error)
        raise RunError(f"{name}: its submission cannot be read: {reason}") from error
    return adapter, datasets
