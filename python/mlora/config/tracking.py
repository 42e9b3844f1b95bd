"""Where a run reports to, as ``report_to`` of Transformers' ``TrainingArguments``; callbacks of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlora.config.aliases import other_tools
from mlora.errors import unknown_value
from mlora.objectives.function_file import placed

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""The trackers that ``report_to`` names. Each is a package of the same name."""


def tracker_names(value: Any) -> Any:
    """Returns the trackers that a value of ``report_to`` names, each once; a value of another type as it is.

    As in ``TrainingArguments``, ``none`` is no tracker, and ``all`` is every one that is installed. Raises
    ValueError for an unknown name.
    """
    given = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        return value
    found: list[str] = []
    for name in given:
        if name == "all":
            found += [each for each in TRACKERS if each not in missing_packages(TRACKERS)]
        elif name in TRACKERS:
            found.append(name)
        elif name != "none":
            raise ValueError(
                unknown_value(name, [*TRACKERS, "all", "none"], other_tools().values["report_to"])
            )
    return list(dict.fromkeys(found))


def missing_packages(trackers: Sequence[str]) -> list[str]:
    """Returns those of the trackers that are not installed.

    A plain folder with such a name, as wandb leaves in the working directory, is no package.
    """
    return [name for name in trackers if (spec := find_spec(name)) is None or spec.origin is None]


def placed_callback(value: Any, folder: Path | str) -> Any:
    """Returns one value of ``callbacks`` with the absolute path of its file, if `folder` has it.

    It is ``file.py:Class`` or ``module:Class``, or a mapping with that as ``name`` and the arguments of the
    class beside it. Raises ValueError if it is neither.
    """
    name = value.get("name") if isinstance(value, Mapping) else value
    if not isinstance(name, str) or not all(name.rpartition(":")):
        raise ValueError(
            "expected file.py:Class or module:Class, or a mapping with that as name and arguments, such as "
            "{name: transformers:EarlyStoppingCallback, early_stopping_patience: 3}"
        )
    found = placed(name, folder)
    return {**value, "name": found} if isinstance(value, Mapping) else found
