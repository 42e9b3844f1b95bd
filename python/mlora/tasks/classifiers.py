"""Adapters whose heads predict labels: whether data and config fit, and how their labels are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from mlora.config.adapter_config import OF_REGRESSION, AdapterConfig
from mlora.config.dataset_config import OF_TASKS, DatasetConfig
from mlora.data.label_formats import FoundLabels, LabelRules, find_labels
from mlora.data.readers import Row
from mlora.data.source import sources_of
from mlora.errors import RunError
from mlora.model.labels import MULTI_LABEL, REGRESSION, add_labels, check_labels, problem_of
from mlora.model.task_heads import why_not_started
from mlora_ext.adapters.trained_parts import LABEL_FIELDS, labels_of, task_heads, task_of

if TYPE_CHECKING:
    from peft import LoraConfig

Finds = Callable[[DatasetConfig, str], FoundLabels]
_TEXTS = {"classification": "text", "question_answering": "question"}


def rows_of(dataset: DatasetConfig) -> Iterator[Row]:
    """Yields the rows of a dataset, with the names of its format."""
    for source, _ in sources_of(dataset):
        yield from source.rows()


def needs_no_tokenizer(dataset: DatasetConfig) -> bool:
    """Whether a dataset holds token ids."""
    if dataset.format not in _TEXTS:
        return dataset.format == "tokens"
    try:
        lines = itertools.islice(rows_of(dataset), 10)
        return not any(_TEXTS[dataset.format] in fields for _, fields in lines)
    except RunError:
        return True  # told by whoever reads the file


def label_rules(
    adapter: AdapterConfig,
    lora: LoraConfig,
    datasets: Mapping[str, DatasetConfig],
    find: Finds = lambda dataset, task: find_labels(rows_of(dataset), task),
) -> LabelRules | None:
    """Returns how an adapter's labels are read; None if it predicts tokens. Gives `lora` what it found.

    Names are those of ``label_names`` or of a head in ``init_from``, else they are found in the training
    data, as lists are.

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
            raise RunError(f"{key}: format {format} needs {_task_asked(adapter, task, kinds)}")
    _check_metrics(adapter, task, classifies)
    if classifies and adapter.init_from and "num_labels" not in labels_of(lora):
        heads = " or ".join(task_heads(lora))
        raise RunError(f"init_from: {adapter.init_from} holds no head ({heads}) among its weights")
    asked = {key: getattr(adapter, key) for key in LABEL_FIELDS}
    try:
        add_labels(lora, asked, lora if adapter.init_from else None)
    except ValueError as error:
        raise RunError(str(error)) from error
    if not classifies:
        return None
    reason = why_not_started(lora)
    if reason is not None:
        raise RunError(f"lora: {reason}")
    rules = _rules(adapter, lora, datasets[adapter.dataset], find)
    rule = adapter.best_rule
    if rule is not None and rule.metric == "eval_accuracy" and rules.problem == REGRESSION:
        raise RunError(f"metric_for_best_model: {OF_REGRESSION}")
    return rules


def _check_metrics(adapter: AdapterConfig, task: str, classifies: bool) -> None:
    """Raises RunError for an objective or a metric that the adapter's task does not have."""
    if classifies:
        if adapter.objective != "cross_entropy":
            raise RunError(f"objective: task_type {task} has a loss of its own; remove objective")
    elif adapter.best_rule is not None and adapter.best_rule.metric == "eval_accuracy":
        needs = _task_asked(adapter, task, " or ".join(OF_TASKS))
        raise RunError(f"metric_for_best_model: accuracy needs {needs}")


def _task_asked(adapter: AdapterConfig, task: str, kinds: str) -> str:
    """Returns where an adapter's task is to be one of these kinds: in its `lora`, or in its folder."""
    if adapter.init_from is None:
        return f"lora.task_type: {kinds}"
    has = "no task_type" if task == "None" else f"task_type {task}"
    return f"an init_from of task_type {kinds}; {adapter.init_from} has {has}"


def _rules(adapter: AdapterConfig, lora: LoraConfig, dataset: DatasetConfig, find: Finds) -> LabelRules:
    """Returns how labels are read; gives `lora`, which has what was asked for, what the data says."""
    task, own = task_of(lora), lora.__dict__
    if task == "QUESTION_ANS":
        return LabelRules(task, "", 2)
    found, path = find(dataset, task), f"the dataset {dataset.name!r}"
    lists = task == "SEQ_CLS" and isinstance(found.first, list)
    if lists and own.get("problem_type") is None and problem_of(lora) != REGRESSION:
        own["problem_type"] = MULTI_LABEL
    problem = problem_of(lora)
    if task == "SEQ_CLS":
        own["problem_type"] = problem
    where, names, listed = "", tuple[str, ...](), "label_names" in labels_of(lora)
    if listed:
        names = tuple(own["label_names"])
    elif found.is_text and problem != REGRESSION:
        names = _names(adapter, path, found, own.get("num_labels"))
        own |= {"num_labels": len(names), "label_names": list(names)}
        if len(names) == 1:
            where = f" in {path}, {names[0]!r}; list all of them in label_names"
    if found.first is None and own.get("num_labels") is None:
        own["num_labels"] = 2  # whoever reads the lines tells what they lack
    try:
        check_labels(lora)
    except ValueError as error:
        raise RunError(f"{error}{where}") from error
    count = int(own["num_labels"])
    flags = not found.is_text and problem == MULTI_LABEL and found.are_flags(count)
    return LabelRules(task, problem, count, names, flags, listed)


def _names(adapter: AdapterConfig, path: str, found: FoundLabels, count: int | None) -> tuple[str, ...]:
    """Returns the names of the labels in the training data, in the order of their ids."""
    if adapter.init_from is not None:
        raise RunError(
            f"init_from: {adapter.init_from} has no labels.json with the names of its labels; give them in "
            f"label_names, in the order of its head, or write numbers as labels in {path}"
        )
    if count not in (None, len(found.names)):
        raise RunError(
            f"num_labels: is {count}, but {path} has {len(found.names)} labels; leave it out, or list all of "
            "them in label_names"
        )
    return found.names
