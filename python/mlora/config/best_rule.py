"""Which evaluation of an adapter is the best: Transformers' ``metric_for_best_model`` and its kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

METRICS = {"eval_loss": "loss", "eval_exact_match": "exact_match (needs eval_exact_match: true)"}
FIELDS = (
    "early_stopping_patience",
    "load_best_model_at_end",
    "metric_for_best_model",
)


@dataclass(frozen=True)
class BestRule:
    """How an adapter's evaluations compare.

    Args:
        metric: a key of ``METRICS``.
        greater: whether greater is better.
        loads: whether the adapter ends with the weights of the best, not of the last step.
    """

    metric: str
    greater: bool
    loads: bool

    def gain(self, value: float, best: float | None) -> float:
        """Return by how much a value is better than the best so far; NaN is never better.

        Args:
            value: of the metric.
            best: of the metric; none = there is none yet.
        """
        if best is None:
            best = float("-inf") if self.greater else float("inf")
        return value - best if self.greater else best - value


def metric_key(name: str) -> str:
    """Return a metric's key in evaluations; its prefix ``eval_`` may be left out, as in Transformers.

    Args:
        name: what the config says.

    Raises:
        ValueError: evaluations do not measure it.
    """
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in METRICS:
        raise ValueError(f"{name!r} is not measured; metrics: {', '.join(METRICS.values())}")
    return key


def best_rule(adapter: Any) -> BestRule | None:
    """Return how an adapter's evaluations compare; none where nothing asks for it.

    As in ``TrainingArguments`` the metric is ``loss`` unless another is named, and greater is better unless
    its name ends in ``loss``. With early stopping the best is loaded unless the config says otherwise.

    Args:
        adapter: an `AdapterConfig`.
    """
    stops, loads = adapter.early_stopping_patience is not None, adapter.load_best_model_at_end
    loads = stops if loads is None else loads
    if not (loads or stops or adapter.metric_for_best_model is not None):
        return None
    metric = metric_key(adapter.metric_for_best_model or "loss")
    greater = adapter.greater_is_better
    return BestRule(metric, not metric.endswith("loss") if greater is None else greater, loads)


def check_best(adapter: Any) -> None:
    """Check that what an adapter's best evaluation depends on is there.

    Args:
        adapter: an `AdapterConfig`, which has an ``eval_dataset`` where it asks for evaluations.

    Raises:
        ValueError: naming the field that lacks something.
    """
    for key in FIELDS:
        if getattr(adapter, key) not in (None, False) and adapter.eval_steps is None:
            raise ValueError(f"{key} needs eval_steps")
    if adapter.early_stopping_threshold and adapter.early_stopping_patience is None:
        raise ValueError("early_stopping_threshold needs early_stopping_patience")
    rule = adapter.best_rule
    if rule is None and adapter.greater_is_better is not None:
        raise ValueError("greater_is_better needs metric_for_best_model or load_best_model_at_end")
    if rule and rule.metric == "eval_exact_match" and not adapter.eval_exact_match:
        raise ValueError("metric_for_best_model: exact_match needs eval_exact_match: true")
