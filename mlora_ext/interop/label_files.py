"""`labels.json` in an adapter's folder: what its head's labels are called, and which loss they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..adapters.trained_parts import labels_of
from ..errors import NamedError

if TYPE_CHECKING:
    from peft import LoraConfig

LABELS = "labels.json"
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
"""Transformers' values of `problem_type`."""


def label_file(config: LoraConfig) -> str | None:
    """Returns the content of `labels.json` for a config; None if it says nothing of its labels.

    The keys are those of a Transformers config: `problem_type` and `id2label`.
    """
    known = labels_of(config)
    found: dict[str, Any] = {key: known[key] for key in ("problem_type",) if key in known}
    if "label_names" in known:
        found["id2label"] = {str(place): name for place, name in enumerate(known["label_names"])}
    return json.dumps(found, ensure_ascii=False, indent=2) + "\n" if found else None


def read_label_file(folder: Path, labels: int) -> dict[str, Any]:
    """Returns the fields of a config that `labels.json` holds; nothing if there is no such file.

    Args:
        labels: the number of labels of the head.

    Raises:
        ValueError: the file is not as `label_file` writes it, or has another number of names.
    """
    path = folder / LABELS
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise NamedError("folder", f"{path} is not valid JSON: {error}") from error
    if not isinstance(stored, dict):
        raise NamedError("folder", f"{path} must hold a JSON object with problem_type or id2label")
    found: dict[str, Any] = {}
    if stored.get("problem_type") is not None:
        if stored["problem_type"] not in PROBLEMS:
            raise NamedError("folder", f"{path}: problem_type must be one of {', '.join(PROBLEMS)}")
        found["problem_type"] = stored["problem_type"]
    if stored.get("id2label") is not None:
        found["label_names"] = _names(path, stored["id2label"], labels)
    return found


def _names(path: Path, stored: Any, labels: int) -> list[str]:
    """Returns the labels' names in the order of their ids."""
    ids = [str(place) for place in range(labels)]
    if not isinstance(stored, dict) or set(stored) != set(ids):
        raise NamedError("folder", f"{path}: id2label must name the labels 0 to {labels - 1} of the head")
    names = [stored[place] for place in ids]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < labels:
        raise NamedError("folder", f"{path}: id2label must hold names that differ, got {names}")
    return names
