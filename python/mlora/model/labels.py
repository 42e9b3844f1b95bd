"""The labels that an adapter's head predicts: which of them fit a task, and the loss that follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlora_ext.adapters.trained_parts import labels_of, task_heads, task_of
from mlora_ext.interop.side_files import PROBLEMS

if TYPE_CHECKING:
    from peft import LoraConfig

REGRESSION, SINGLE_LABEL, MULTI_LABEL = PROBLEMS
_CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS")
_TASKS_OF = {"num_labels": _CLASSIFIERS, "label_names": _CLASSIFIERS, "problem_type": ("SEQ_CLS",)}
"""Tasks that have each of the fields that say what an adapter's labels are."""


def add_labels(config: LoraConfig, asked: Mapping[str, Any], stored: LoraConfig | None = None) -> None:
    """Gives a config the labels that are asked for, or those of the head that its adapter starts from.

    Args:
        config: an adapter's.
        asked: values of `LABEL_FIELDS`; None = not asked.
        stored: the config of a folder that the adapter starts from, as `read_config` returns it.

    Raises:
        ValueError: the task has no such labels, a value is malformed, or the stored head has others.
    """
    task, asked = task_of(config), {key: value for key, value in asked.items() if value is not None}
    kept = labels_of(stored) if stored is not None and task_of(stored) == task else {}
    for key, value in asked.items():
        if task not in _TASKS_OF[key]:
            raise ValueError(f"{key}: needs task_type {' or '.join(_TASKS_OF[key])}")
        _check_value(key, value)
        if kept.get(key, value) != value:
            raise ValueError(f"{key}: is {value}, but that of the head in init_from is {kept[key]}")
    config.__dict__.update(kept | labels_of(config) | asked)
    if "label_names" in asked:
        _count_names(config)


def _count_names(config: LoraConfig) -> None:
    """Takes the number of labels from their names; ValueError if another one is asked for."""
    names, count = config.__dict__["label_names"], labels_of(config).get("num_labels")
    if count not in (None, len(names)):
        raise ValueError(f"label_names: has {len(names)} names, but num_labels is {count}")
    config.__dict__["num_labels"] = len(names)
    if problem_of(config) == REGRESSION:
        raise ValueError("label_names: a regression predicts numbers; leave them out")


def _check_value(key: str, value: Any) -> None:
    if key == "num_labels" and (type(value) is not int or value < 1):
        raise ValueError(f"num_labels: expected a whole number of at least 1, got {value!r}")
    if key == "problem_type" and value not in PROBLEMS:
        raise ValueError(f"problem_type: expected one of {', '.join(PROBLEMS)}, got {value!r}")
    if key == "label_names":
        texts = isinstance(value, list) and all(isinstance(one, str) and one for one in value)
        if not texts or not value or len(set(value)) < len(value):
            raise ValueError(f"label_names: expected a list of names that differ, got {value!r}")


def check_labels(config: LoraConfig) -> None:
    """Raises ValueError if a config's labels are too few for its task, or have a loss that it lacks."""
    task, count = task_of(config), labels_of(config).get("num_labels")
    if task not in _CLASSIFIERS:
        return
    if count is None:
        hint = "; 1 for a regression, whose labels are numbers" if task == "SEQ_CLS" else ""
        raise ValueError(f"num_labels: task_type {task} needs the number of labels{hint}")
    problem = problem_of(config)
    if task == "TOKEN_CLS" and problem != SINGLE_LABEL:
        raise ValueError(f"problem_type: task_type TOKEN_CLS has no {problem}; leave it out")
    if count == 1 and problem == SINGLE_LABEL:
        raise ValueError(f"num_labels: task_type {task} needs at least 2 labels, got 1")


def problem_of(config: LoraConfig) -> str:
    """Returns a classifier's `problem_type`.

    As in Transformers, a head of one label is that of a regression unless the config says otherwise, or
    names the label.
    """
    known = labels_of(config)
    alone = known.get("num_labels") == 1 and task_of(config) == "SEQ_CLS" and "label_names" not in known
    return str(known.get("problem_type", REGRESSION if alone else SINGLE_LABEL))


def label_objective(config: LoraConfig) -> dict[str, Any] | None:
    """Returns the name and options of the loss of an adapter's labels; None if its head predicts tokens."""
    if not task_heads(config):
        return None
    if task_of(config) == "QUESTION_ANS":
        return {"name": "question_answering", "num_labels": 2}
    return {"name": problem_of(config), "num_labels": int(labels_of(config)["num_labels"])}
