"""Adapters whose heads predict labels: whether data and config fit, and how their labels are read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.config.run_config import AdapterConfig
from mlora.config.sections import OF_TASKS, DatasetConfig
from mlora.data.found_labels import FoundLabels, find_labels
from mlora.data.label_formats import LabelRules
from mlora.errors import RunError
from mlora.model.task_heads import why_not_started
from mlora_ext.adapters.trained_parts import labels_of, task_heads, task_of

if TYPE_CHECKING:
    from peft import LoraConfig

Finds = Callable[[Path, str], FoundLabels]
_TEXTS = {"classification": "text", "question_answering": "question"}


def needs_no_tokenizer(dataset: DatasetConfig) -> bool:
    """Whether a dataset holds token ids."""
    if dataset.format not in _TEXTS:
        return dataset.format == "tokens"
    try:
        with open(Path(dataset.path), encoding="utf-8") as file:
            lines = [line for line in itertools.islice(file, 10) if line.strip()]
        return not any(_TEXTS[dataset.format] in json.loads(line) for line in lines)
    except (OSError, ValueError, TypeError):
        return True  # told by whoever reads the file


def label_rules(
    adapter: AdapterConfig,
    lora: LoraConfig,
    datasets: Mapping[str, DatasetConfig],
    find: Finds = find_labels,
) -> LabelRules | None:
    """Returns how an adapter's labels are read; None if it predicts tokens. Gives `lora` what it found.

    Names and lists are found in the training data; the names of a head in ``init_from`` are kept.

    Args:
        lora: the adapter's config, or that of its ``init_from``.
        datasets: by name.
        find: `find_labels`, or what has kept its results.

    Raises:
        RunError: the adapter's task, labels, metrics and formats do not fit together.
    """
    task, classifies = task_of(lora), bool(task_heads(lora))
    for key in ("dataset", "eval_dataset"):
        name = getattr(adapter, key)
        format = datasets[name].format if name else OF_TASKS.get(task)
        if format != OF_TASKS.get(task) and classifies:
            raise RunError(f"{key}: task_type {task} needs format {OF_TASKS[task]}, got {format!r}")
        if format in OF_TASKS.values() and not classifies:
            kinds = " or ".join(one for one, wanted in OF_TASKS.items() if wanted == format)
            raise RunError(f"{key}: format {format} needs lora.task_type: {kinds}")
    _check_keys(adapter, task, classifies)
    if not classifies:
        return None
    reason = why_not_started(lora)
    if reason is not None:
        raise RunError(f"lora: {reason}")
    rules = _rules(adapter, lora, Path(datasets[adapter.dataset].path), find)
    rule = adapter.best_rule
    if rule is not None and rule.metric == "eval_accuracy" and rules.problem == "regression":
        raise RunError("metric_for_best_model: a regression has no accuracy; use loss")
    if task != "QUESTION_ANS":
        lora.__dict__["num_labels"] = rules.count
    if task == "SEQ_CLS":
        lora.__dict__["problem_type"] = rules.problem
    if rules.names:
        lora.__dict__["label_names"] = list(rules.names)
    return rules


def _check_keys(adapter: AdapterConfig, task: str, classifies: bool) -> None:
    """Raises RunError for keys that the adapter's task does not have."""
    if task not in ("SEQ_CLS", "TOKEN_CLS") and adapter.num_labels is not None:
        raise RunError("num_labels: needs lora.task_type: SEQ_CLS or TOKEN_CLS")
    if task != "SEQ_CLS" and adapter.problem_type is not None:
        raise RunError("problem_type: needs lora.task_type: SEQ_CLS")
    if classifies:
        if adapter.objective != "cross_entropy":
            raise RunError(f"objective: task_type {task} has a loss of its own; remove {adapter.objective!r}")
    elif adapter.best_rule is not None and adapter.best_rule.metric == "eval_accuracy":
        raise RunError(f"metric_for_best_model: accuracy needs lora.task_type: {' or '.join(OF_TASKS)}")


def _rules(adapter: AdapterConfig, lora: LoraConfig, path: Path, find: Finds) -> LabelRules:
    task, known = task_of(lora), labels_of(lora)
    if task == "QUESTION_ANS":
        return LabelRules(task, "", 2)
    count = known.get("num_labels")
    if adapter.num_labels not in (None, count):
        raise RunError(f"num_labels: is {adapter.num_labels}, but the head in init_from has {count} labels")
    asked, stored = adapter.problem_type, known.get("problem_type")
    if adapter.init_from and asked and stored not in (None, asked):
        raise RunError(f"problem_type: is {asked}, but the head in init_from was trained for {stored}")
    found = find(path, task)
    problem = asked or stored or _problem(task, count, found.first)
    names: tuple[str, ...] = ()
    if problem != "regression" and found.is_text:
        names = _names(adapter, path, found, count, known.get("label_names"))
        count = len(names)
    if count is None and found.first is not None:  # else whoever reads the lines tells what they lack
        hint = "; 1 for a regression, whose labels are numbers" if task == "SEQ_CLS" else ""
        raise RunError(f"num_labels: task_type {task} needs the number of labels{hint}")
    if count == 1 and problem == "single_label_classification":
        where = f" in {path}, {names[0]!r}" if names else ""
        raise RunError(f"num_labels: task_type {task} needs at least 2 labels, got 1{where}")
    flags = not names and problem == "multi_label_classification" and found.are_flags(count)
    return LabelRules(task, problem, count or 2, names, flags)


def _problem(task: str, count: int | None, given: Any) -> str:
    """Returns the `problem_type` that follows from the data, as in Transformers."""
    if task == "SEQ_CLS" and count == 1:
        return "regression"
    lists = task == "SEQ_CLS" and isinstance(given, list)
    return "multi_label_classification" if lists else "single_label_classification"


def _names(
    adapter: AdapterConfig, path: Path, found: FoundLabels, count: int | None, stored: list[str] | None
) -> tuple[str, ...]:
    """Returns the names of the labels in the order of their ids."""
    if adapter.init_from is not None:
        if stored is None:
            raise RunError(
                f"init_from: {adapter.init_from} has no labels.json with the names of its labels; write "
                f"numbers as labels in {path}"
            )
        return tuple(stored)
    if count not in (None, len(found.names)):
        raise RunError(f"num_labels: is {count}, but {path} has {len(found.names)} labels; leave it out")
    return found.names
