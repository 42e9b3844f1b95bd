"""A task that is submitted to a run: an adapter as it would stand in the run's YAML, and its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlora.config import AdapterConfig, DatasetConfig, RunConfig
from mlora.config_file import read_yaml, resolve_config
from mlora.errors import RunError
from mlora.task_queue import Request


def read_submission(path: Path, config: RunConfig, taken: Mapping[str, Any]) -> dict[str, Any]:
    """Read a task's YAML and check it as part of a run.

    It holds what stands below ``adapters`` for one task, and ``datasets`` where it needs some that the run
    does not have. What it leaves out comes from the run's ``defaults``; paths are relative to the file.

    Args:
        path: the file.
        config: the run's.
        taken: names of tasks that the run has beside those of its config.

    Returns:
        The request's content: plain values of the resolved ``adapter``, and of its ``datasets``.

    Raises:
        RunError: the file is wrong, or its names are taken.
    """
    data = read_yaml(path)
    datasets = data.pop("datasets", [])
    if not isinstance(datasets, list):
        raise RunError(f"{path}: datasets: must be a list, got {type(datasets).__name__}")
    if data.get("name") in taken:
        raise RunError(f"{path}: name: the run has had a task {data['name']!r}; take another name")
    base = config.model_dump()
    whole = {
        **base,
        "adapters": [*base["adapters"], data],
        "datasets": [*base["datasets"], *datasets],
    }
    try:
        resolved = resolve_config(whole, folder=path.parent, where=str(path))
    except RunError as error:
        own_path = f"adapters[{len(base['adapters'])}]"
        raise RunError(str(error).replace(f"{own_path}.", "").replace(f"{own_path}: ", "")) from error
    new = resolved.adapters[-1]
    own = {new.dataset, new.eval_dataset}
    return {
        "adapter": new.model_dump(),
        "datasets": [d.model_dump() for d in resolved.datasets if d.name in own],
    }


def submitted(request: Request) -> tuple[AdapterConfig, list[DatasetConfig]]:
    """Return what a submission asks for.

    Args:
        request: a submission.

    Raises:
        RunError: its content is none of this version.
    """
    try:
        adapter = AdapterConfig.model_validate(request.content["adapter"])
        datasets = [DatasetConfig.model_validate(entry) for entry in request.content["datasets"]]
    except (KeyError, ValueError) as error:
        raise RunError(f"{request.task}: its submission cannot be read: {error}") from error
    return adapter, datasets
