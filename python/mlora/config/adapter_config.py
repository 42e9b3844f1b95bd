"""The config of one adapter: its data, its hyperparameters, what it is."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from mlora.config.best_rule import BestRule, best_rule, check_evaluation
from mlora.config.lora_fields import LoraBlock
from mlora.config.strict import MOST, ResolvedPath, wrong_key
from mlora.config.training_fields import TrainingFields
from mlora.optim.optim_config import loraplus_fault


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
