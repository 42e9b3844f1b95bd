"""The config of one adapter: its data, its hyperparameters, what it is, and which evaluation is its best."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mlora.config.dataset_config import OF_TASKS
from mlora.config.lora_fields import LoraBlock
from mlora.config.strict import MOST, ResolvedPath, wrong_key
from mlora.config.training_fields import TrainingFields
from mlora.errors import spelt_alike
from mlora.objectives.registry import CROSS_ENTROPY, metrics_of, name_of
from mlora.optim.optim_config import loraplus_fault

NEEDS_CLASSIFIER = f"accuracy needs lora.task_type: {' or '.join(OF_TASKS)}"
OF_REGRESSION = "a regression has no accuracy; use loss"
FIELDS = ("early_stopping_patience", "load_best_model_at_end", "metric_for_best_model")


@dataclass(frozen=True)
class BestRule:
    """How two evaluations of an adapter compare."""

    metric: str  # a key of evaluations, such as ``eval_loss``
    greater: bool  # whether greater is better
    loads: bool  # whether the adapter ends with the weights of its best evaluation, not of its last step

    def gain(self, value: float, best: float | None) -> float:
        """Returns by how much `value` beats `best` (None: no best yet). NaN gives NaN, which is no gain."""
        if best is None:
            best = float("-inf") if self.greater else float("inf")
        return value - best if self.greater else best - value


def metric_key(name: str) -> str:
    """Returns a metric's key in evaluations. As in Transformers, the prefix ``eval_`` may be left out."""
    return name if name.startswith("eval_") else f"eval_{name}"


def greater_is_better(metric: str, asked: bool | None) -> bool:
    """Whether greater is better: as `asked`, or as Transformers has it, unless the name ends in ``loss``."""
    return not metric.endswith("loss") if asked is None else asked


def unknown_metric(asked: str, objective: Any) -> str | None:
    """Returns why evaluations with an objective lack a metric; None: they have it.

    What a loss of one's own reports shows in the first evaluation.
    """
    found = metrics_of(objective)
    if found is None:
        return None
    known = {"loss": "", **dict.fromkeys(found, "")}
    if name_of(objective) == CROSS_ENTROPY:
        known |= {"accuracy": " (of a classifier)", "exact_match": " (needs eval_exact_match: true)"}
    name = metric_key(asked).removeprefix("eval_")
    if name in known:
        return None
    near = spelt_alike(name, list(known))
    metrics = ", ".join(one + more for one, more in known.items())
    hint = f"did you mean {near!r}?" if near else f"metrics: {metrics}"
    return f"{asked!r} is not measured with objective {name_of(objective)}; {hint}"


def best_rule(adapter: Any) -> BestRule | None:
    """Returns how an `AdapterConfig`'s evaluations compare, or None if no field asks for it.

    As in ``TrainingArguments``, the metric defaults to ``loss``, and greater is better unless its name ends
    in ``loss``. With early stopping, the best weights are loaded unless the config says otherwise.
    """
    stops, loads = adapter.early_stopping_patience is not None, adapter.load_best_model_at_end
    loads = stops if loads is None else loads
    if not (loads or stops or adapter.metric_for_best_model is not None):
        return None
    metric = metric_key(adapter.metric_for_best_model or "loss")
    return BestRule(metric, greater_is_better(metric, adapter.greater_is_better), loads)


def check_evaluation(adapter: Any) -> None:
    """Raises ValueError if a field of an `AdapterConfig` lacks another that its evaluations need."""
    for key in ("eval_steps", "eval_exact_match", *FIELDS):
        if getattr(adapter, key) in (None, False):
            continue
        if adapter.eval_dataset is None:
            raise ValueError(f"{key} needs an eval_dataset")
        if key in FIELDS and adapter.eval_steps is None:
            raise ValueError(f"{key} needs eval_steps")
    if adapter.early_stopping_threshold and adapter.early_stopping_patience is None:
        raise ValueError("early_stopping_threshold needs early_stopping_patience")
    rule = adapter.best_rule
    if rule is None and adapter.greater_is_better is not None:
        raise ValueError("greater_is_better needs metric_for_best_model or load_best_model_at_end")
    if rule and rule.metric == "eval_exact_match" and not adapter.eval_exact_match:
        raise ValueError("metric_for_best_model: exact_match needs eval_exact_match: true")


class AdapterConfig(TrainingFields):
    """One task: an adapter, its data and its hyperparameters."""

    name: str = Field(
        description="Name of the adapter and of its folder: letters, digits, `_`, `-` and `+`, 100 at most."
    )
    dataset: str = Field(description="Name of the dataset to train on, one of `datasets`.")
    lora: LoraBlock | None = Field(
        default=None, description="Fields of PEFT's `LoraConfig`; needed unless `init_from` is given."
    )
    init_from: ResolvedPath | None = Field(
        default=None,
        description="PEFT folder of an adapter from which training goes on; relative to the YAML's folder.",
    )
    num_labels: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Number of labels that the head predicts; needed where labels are ids, found where "
        "they are names.",
    )
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = Field(
        default=None,
        description="What a head of SEQ_CLS predicts; null: `num_labels: 1` is a regression, lists are "
        "several labels.",
    )
    label_names: list[str] | None = Field(
        default=None,
        description="Names of the labels, in the order of their ids; null: those in the training data, "
        "sorted.",
    )
    priority: int = Field(
        default=0,
        ge=-MOST,
        le=MOST,
        description="Tasks of higher priority are admitted first, and set others aside when memory is short.",
    )

    @property
    def best_rule(self) -> BestRule | None:
        """How the adapter's evaluations compare; None if no field asks which is the best."""
        return best_rule(self)

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if name == "__base__":
            raise ValueError("'__base__' is reserved for the base model without an adapter")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_+-]{0,99}", name):
            # a dot separates modules in PyTorch's state dict keys
            raise ValueError(
                f"{name!r} is not a plain name; use letters, digits, '_', '-' and '+', 100 at most"
            )
        return name

    @model_validator(mode="after")
    def _needs(self) -> AdapterConfig:
        check_evaluation(self)
        fault = loraplus_fault(self.learning_rate, self.loraplus_lr_ratio, self.loraplus_lr_embedding)
        if fault:
            raise wrong_key(*fault)
        return self
