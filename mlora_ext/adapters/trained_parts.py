"""Parts of the base that an adapter trains itself: whole modules, and rows of embeddings."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from ..errors import AdapterError

if TYPE_CHECKING:
    from peft import LoraConfig

TRAINED_COPY = "trained_copy"
"""Kind of an adapter on a module of which it trains a copy (`modules_to_save`)."""
TRAINED_ROWS = "trained_rows"
"""Kind of an adapter on an embedding of which it trains some rows (`trainable_token_indices`)."""
TASK_HEAD, TASK_HEAD_WITH_BIAS = "task_head", "task_head_with_bias"
"""Kinds of an adapter that has a head which the base model lacks."""
TRAINED_PARTS = (TRAINED_COPY, TRAINED_ROWS, TASK_HEAD, TASK_HEAD_WITH_BIAS)
_HEADS = {
    "SEQ_CLS": (("classifier", "score"), TASK_HEAD),
    "TOKEN_CLS": (("classifier", "score"), TASK_HEAD_WITH_BIAS),
    "QUESTION_ANS": (("qa_outputs",), TASK_HEAD_WITH_BIAS),
}
"""Of each `task_type` that has a head: its names, and its kind beside a causal base."""
LABEL_FIELDS = ("num_labels", "problem_type", "label_names")
"""What a config has beside PEFT's fields, if its head predicts labels: see `labels_of`."""


def task_heads(config: LoraConfig) -> tuple[str, ...]:
    """Returns the names of heads that PEFT trains for a config's `task_type`."""
    names, _ = _HEADS.get(task_of(config), ((), ""))
    return names


def head_kind(config: LoraConfig) -> str:
    """Returns the kind of the head that a config's `task_type` has beside a causal base."""
    return _HEADS[task_of(config)][1]


def labels_of(config: LoraConfig) -> dict[str, Any]:
    """Returns what a config says of its labels: those of `LABEL_FIELDS` that are set.

    `num_labels`, Transformers' `problem_type`, and `label_names`, which are in the order of the labels' ids.
    """
    return {key: config.__dict__[key] for key in LABEL_FIELDS if config.__dict__.get(key) is not None}


def task_of(config: LoraConfig) -> str:
    """Returns a config's `task_type` as plain text."""
    return str(getattr(config.task_type, "value", config.task_type))


def with_task_heads(config: LoraConfig) -> LoraConfig:
    """Returns a copy whose `modules_to_save` also names the task's heads, as PEFT adds them."""
    config = copy.deepcopy(config)
    names = list(config.modules_to_save or ())
    names += [name for name in task_heads(config) if name not in names]
    config.modules_to_save = names or None
    return config


def check_trained_parts(name: str, config: LoraConfig) -> None:
    """Refuses malformed `modules_to_save` and `trainable_token_indices` (ValueError)."""
    saved = config.modules_to_save
    listed = isinstance(saved, list | tuple | set)
    if saved is not None and not (listed and all(isinstance(one, str) and one for one in saved)):
        raise AdapterError(name, f"modules_to_save: expected a list of names of modules, got {saved!r}")
    tokens: Any = config.trainable_token_indices
    for rows in tokens.values() if isinstance(tokens, dict) else () if tokens is None else (tokens,):
        if not isinstance(rows, list | tuple) or not rows or not all(type(row) is int for row in rows):
            raise AdapterError(
                name,
                f"trainable_token_indices: expected a list of token ids, or one for each "
                f"embedding by name, got {tokens!r}",
            )
        if len(set(rows)) != len(rows):
            raise AdapterError(name, f"trainable_token_indices: a token is named twice in {rows!r}")
