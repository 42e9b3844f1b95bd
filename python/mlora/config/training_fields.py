"""The training fields of an adapter, which ``defaults`` may hold for all: those of ``TrainingArguments``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from mlora.config.aliases import other_tools
from mlora.config.strict import MOST, Strict, wrong_keys
from mlora.config.tracking import placed_callback
from mlora.errors import unknown_value
from mlora.objectives.options import ObjectiveError
from mlora.objectives.registry import CROSS_ENTROPY, resolved
from mlora.optim.optim_config import LARGEST
from mlora.optim.registry import missing_package, optimizer_names


class TrainingFields(Strict):
    """The fields of ``defaults``, which each adapter may override.

    ``warmup_steps``, ``eval_steps``, ``logging_steps`` and ``save_steps`` below 1 are ratios of the adapter's
    total steps, as in Transformers. ``max_length`` and ``assistant_only_loss`` are TRL's.
    ``load_best_model_at_end`` defaults to true with ``early_stopping_patience`` and to false without it; see
    `mlora.config.adapter_config`.
    """

    per_device_train_batch_size: int = Field(
        default=8, ge=1, le=MOST, description="Samples of the adapter in one training batch."
    )
    per_device_eval_batch_size: int = Field(
        default=8, ge=1, le=MOST, description="Samples of the adapter in one evaluation batch."
    )
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, le=MOST, description="Batches whose gradients are added up for one optimizer step."
    )
    learning_rate: float = Field(
        default=5e-5,
        ge=0,
        le=LARGEST["learning_rate"],
        allow_inf_nan=False,
        description="Peak of the learning rate.",
    )
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = Field(default="linear", description="Schedule of the learning rate, by its name in Transformers.")
    lr_scheduler_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further arguments of the schedule, such as `num_cycles` or `min_lr`."
    )
    warmup_steps: float = Field(
        default=0,
        ge=0,
        le=MOST,
        description="Optimizer steps over which the learning rate rises from 0; below 1: a ratio of the "
        "adapter's total steps.",
    )
    max_steps: int = Field(
        default=-1, le=MOST, description="Optimizer steps to train; -1: train `num_train_epochs` instead."
    )
    num_train_epochs: float = Field(
        default=3.0, gt=0, le=MOST, description="Passes over the dataset; read where `max_steps` is -1."
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        le=LARGEST["weight_decay"],
        allow_inf_nan=False,
        description="Weight decay of the optimizer; biases and norms have none.",
    )
    adam_beta1: float = Field(
        default=0.9, ge=0, lt=1, description="First decay rate (beta1) of Adam and Lion."
    )
    adam_beta2: float = Field(
        default=0.999,
        ge=0,
        lt=1,
        description="Second decay rate (beta2) of Adam and Lion.",
    )
    adam_epsilon: float = Field(
        default=1e-8, ge=0, allow_inf_nan=False, description="Number that Adam adds to the denominator."
    )
    max_grad_norm: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Largest norm of the adapter's gradient, beyond which it is scaled down; 0: no clipping.",
    )
    optim: str = Field(
        default="adamw_torch_fused",
        description="Optimizer, by its name in Transformers or `torch.optim`; `lora_fa` is PEFT's.",
    )
    loraplus_lr_ratio: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="LoRA+: learning rate of `lora_B` divided by that of `lora_A`; null: both are equal.",
    )
    loraplus_lr_embedding: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="LoRA+: learning rate of low-rank parts of embeddings; null: 1e-6.",
    )
    objective: str | dict[str, Any] = Field(
        default=CROSS_ENTROPY,
        description="Loss of the adapter: a name, `module:function`, or a mapping of `name` and options.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seed of the adapter; null: derived from the run's seed and the adapter's name.",
    )
    eval_dataset: str | None = Field(
        default=None,
        description="Name of the dataset to evaluate on, before training, every `eval_steps` and at the "
        "end; null: none.",
    )
    eval_steps: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Optimizer steps between evaluations; below 1: a ratio of the adapter's total steps; "
        "null: before and after training only.",
    )
    eval_exact_match: bool = Field(
        default=False,
        description="Whether to complete the evaluation prompts greedily (of chats, the last answer) and "
        "count the completions that are exactly right.",
    )
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        description="Evaluations in a row without improvement after which the adapter ends; null: it "
        "makes all steps.",
    )
    early_stopping_threshold: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Smallest improvement that counts for early stopping.",
    )
    load_best_model_at_end: bool | None = Field(
        default=None,
        description="Whether to save the weights of the best evaluation instead of the last step; null: "
        "only with early stopping.",
    )
    metric_for_best_model: str | None = Field(
        default=None,
        description="Metric by which evaluations are compared, with or without `eval_`; null: `loss`.",
    )
    greater_is_better: bool | None = Field(
        default=None,
        description="Whether a greater metric is better; null: yes, unless its name ends in `loss`.",
    )
    max_length: int = Field(
        default=1024,
        ge=2,
        description="Most tokens of a sample; longer samples are cut, and a warning counts them.",
    )
    assistant_only_loss: bool = Field(
        default=False, description="Whether to train only what the assistant says in a conversation."
    )
    shuffle: bool = Field(
        default=True,
        description="Random order; false: the file's. Batches then run on across its end: 2 epochs of 10 "
        "samples in batches of 4 are 5 steps, where `Trainer` makes 6.",
    )
    init_samples: int = Field(
        default=256,
        ge=1,
        le=MOST,
        description="Samples of the adapter's own data that `eva`, `corda` and `lora_ga` look at before "
        "training.",
    )
    logging_steps: float = Field(
        default=500,
        gt=0,
        allow_inf_nan=False,
        description="Optimizer steps between printed lines; below 1: a ratio of the adapter's total "
        "steps. `metrics.jsonl` has every step.",
    )
    save_steps: float | None = Field(
        default=500,
        gt=0,
        allow_inf_nan=False,
        description="Optimizer steps between checkpoints; below 1: a ratio of the adapter's total steps; "
        "null: none before the end.",
    )
    callbacks: list[str | dict[str, Any]] | None = Field(
        default=None,
        description="Transformers' `TrainerCallback`s: `file.py:Class`, `module:Class`, or a mapping of "
        "that as `name` and arguments.",
    )

    @field_validator("callbacks", mode="before")
    @classmethod
    def _placed_callbacks(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value
        return [placed_callback(one, (info.context or {}).get("folder", ".")) for one in value]

    @field_validator("warmup_steps", "eval_steps", "logging_steps", "save_steps")
    @classmethod
    def _whole_or_ratio(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and value != int(value):
            raise ValueError(f"must be a whole number of steps, or a ratio below 1, got {value}")
        return value

    @field_validator("optim")
    @classmethod
    def _registered(cls, value: str) -> str:
        names = optimizer_names()
        if value not in names:
            raise ValueError(unknown_value(value, names, other_tools().values["optim"]))
        if package := missing_package(value):
            raise ValueError(f"{value!r} needs the package {package}: pip install {package}")
        return value

    @field_validator("objective", mode="before")
    @classmethod
    def _objective(cls, value: Any, info: ValidationInfo) -> str | dict[str, Any]:
        try:
            return resolved(value, (info.context or {}).get("folder", "."))
        except ObjectiveError as error:
            raise wrong_keys({error.loc: error.message}) from error

    @field_validator("max_steps")
    @classmethod
    def _max_steps(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"must be at least 1, or -1 to train num_train_epochs instead, got {value}")
        return value


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
