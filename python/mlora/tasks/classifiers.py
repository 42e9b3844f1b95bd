"""Checks that an adapter with a classifier of its own has labelled data, and other adapters do not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlora.config.run_config import AdapterConfig
from mlora.data.dataset import Dataset
from mlora.data.record import NOT_TRAINED
from mlora.errors import RunError
from mlora.model.task_heads import why_not_started
from mlora_ext.adapters.trained_parts import task_heads, task_of

if TYPE_CHECKING:
    from peft import LoraConfig


def has_text(path: str) -> bool:
    """Whether one of the first lines of a dataset has `text`; a file that cannot be read has none."""
    try:
        with open(Path(path), encoding="utf-8") as file:
            lines = [line for line in itertools.islice(file, 10) if line.strip()]
        return any("text" in json.loads(line) for line in lines)
    except (OSError, ValueError, TypeError):
        return False  # told by whoever reads the file


def check_classifier(
    adapter: AdapterConfig, lora: LoraConfig, formats: Sequence[str], data: Sequence[Dataset]
) -> None:
    """Raises RunError if an adapter's task, `num_labels` and data do not fit together.

    Args:
        lora: the adapter's config, or that of its ``init_from``.
        formats: of its datasets.
        data: its datasets.
    """
    task, classifies = task_of(lora), bool(task_heads(lora))
    for format in formats:
        if (format == "classification") is not classifies:
            if classifies:
                raise RunError(f"dataset: task_type {task} needs format classification, got {format!r}")
            raise RunError("dataset: format classification needs lora.task_type: SEQ_CLS or TOKEN_CLS")
    known = getattr(lora, "num_labels", None)
    if not classifies:
        if adapter.num_labels is not None:
            raise RunError("num_labels: needs lora.task_type: SEQ_CLS or TOKEN_CLS")
        rule = adapter.best_rule if adapter.objective == "cross_entropy" else None
        if rule is not None and rule.metric == "eval_accuracy":
            raise RunError("metric_for_best_model: accuracy needs lora.task_type: SEQ_CLS or TOKEN_CLS")
        return
    if adapter.objective != "cross_entropy":
        raise RunError(f"objective: task_type {task} has a loss of its own; remove {adapter.objective!r}")
    reason = why_not_started(lora)
    if reason is not None:
        raise RunError(f"lora: {reason}")
    if known is None:
        raise RunError(f"num_labels: task_type {task} needs the number of labels")
    if adapter.num_labels not in (None, known):
        raise RunError(f"num_labels: is {adapter.num_labels}, but the head in init_from has {known} labels")
    for one in data:
        for sample in one.samples:
            single = all(label == NOT_TRAINED for label in sample.labels[:-1])
            if task == "SEQ_CLS" and not (single and sample.labels[-1] != NOT_TRAINED):
                raise RunError("dataset: task_type SEQ_CLS needs one label for each line, got a list")
            for label in sample.labels:
                if label != NOT_TRAINED and not 0 <= label < known:
                    raise RunError(
                        f"dataset: label {label} is outside of 0 to {known - 1} (num_labels: {known})"
                    )
