"""Which fields of ``defaults`` an adapter takes over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NEEDED_BY = {
    "eval_dataset": ("eval_steps", "eval_exact_match"),
    "eval_steps": (
        *("early_stopping_patience", "load_best_model_at_end"),
        *("metric_for_best_model", "greater_is_better"),
    ),
    "early_stopping_patience": ("early_stopping_threshold",),
}
"""Fields, and those that have nothing to act on without them. A field comes before those that need it."""


def inherited(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``defaults`` for an adapter with fields of its `own`, which then go over them.

    ``max_steps`` wins over ``num_train_epochs`` if both stand in one place. An adapter's own epochs win over
    steps from ``defaults``. Defaults for evaluations do not apply to an adapter that has none.
    """
    found = dict(defaults)
    if "num_train_epochs" in own and "max_steps" not in own:
        found.pop("max_steps", None)
    lacking = {"eval_dataset"} if own.get("eval_dataset", found.get("eval_dataset")) is None else set()
    lacking |= {need for need in _NEEDED_BY if need in own and own[need] is None}
    for need, keys in _NEEDED_BY.items():
        for key in keys if need in lacking else ():
            found.pop(key, None)
            lacking |= {key} - own.keys()
    return found


def idle_defaults(defaults: Mapping[str, Any]) -> list[str]:
    """Returns the fields of ``defaults`` that act on no adapter where none has an `eval_dataset`."""
    return [key for keys in _NEEDED_BY.values() for key in keys if defaults.get(key)]
