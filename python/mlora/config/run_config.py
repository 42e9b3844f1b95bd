"""The config of a run and of its adapters.

Names and defaults are those of Transformers' ``TrainingArguments`` and PEFT's ``LoraConfig``. Every key
works or is refused. `mlora.config.config_file` reads the YAML and explains faults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from mlora.config.aliases import VALUES, nearest
from mlora.config.best_rule import BestRule, best_rule, check_evaluation, unknown_metric
from mlora.config.full_method import full_faults
from mlora.config.inherited import inherited
from mlora.config.lora_fields import LoraBlock
from mlora.config.offload_config import Method, OffloadConfig, not_served
from mlora.config.quantization_config import QuantizationConfig, quantization_faults
from mlora.config.sections import (
    FORMATS_OF,
    OF_TASKS,
    WITH_MESSAGES,
    WITH_PROMPTS,
    DatasetConfig,
    PipelineConfig,
    SchedulerConfig,
)
from mlora.config.strict import (
    MOST,
    Location,
    ResolvedPath,
    Strict,
    is_hub_id,
    resolve_path,
    wrong_key,
    wrong_keys,
)
from mlora.config.sweep_config import SweepConfig
from mlora.config.tracking import placed_callback, tracker_names
from mlora.errors import unknown_value
from mlora.objectives.options import BASE_ROWS, START, ObjectiveError
from mlora.objectives.registry import (
    CROSS_ENTROPY,
    name_of,
    objectives_taking,
    reads_mismatched,
    reference_of,
    resolved,
    takes,
)
from mlora.optim.optim_config import LARGEST, loraplus_fault
from mlora.optim.registry import missing_package, optimizer_names


class TrainingFields(Strict):
    """The fields of ``defaults``, which each adapter may override.

    ``warmup_steps``, ``eval_steps``, ``logging_steps`` and ``save_steps`` below 1 are ratios of the adapter's
    total steps, as in Transformers. ``max_length`` and ``assistant_only_loss`` are TRL's.
    ``load_best_model_at_end`` defaults to true with ``early_stopping_patience`` and to false without it; see
    `mlora.config.best_rule`.
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
        description="Optimizer, by its name in Transformers; `lora_fa` is PEFT's.",
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
        description="Whether to complete the evaluation prompts greedily and count the completions that "
        "are exactly right.",
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
        default=True, description="Whether to draw samples in random order; false: in the file's order."
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
            raise ValueError(unknown_value(value, names, VALUES["optim"]))
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


class RunConfig(Strict):
    """A whole run, resolved: paths are absolute, and every adapter holds all of its training fields.

    ``method`` is what is trained: ``lora``, adapters over a frozen base; ``full``, all weights of the model,
    as one task. ``base_gemm`` is the library that
    multiplies by the frozen weights on a CPU. Without it, the run measures which one to take and names it in
    its resolved config, because rounding depends on it. ``pack_base`` also keeps these weights in oneDNN's
    own layouts and multiplies with them. That is faster and takes about three times the memory of the
    weights. ``report_to`` names trackers, to which ``run_name``, ``project`` and ``logging_dir`` belong.
    ``quantization`` quantises the base model's linear weights while they are read. A run with a
    ``sweep`` lists no adapters: trials are added while it runs.

    Example:
        >>> # relative paths in data start at the folder "examples"
        >>> config = RunConfig.model_validate(data, context={"folder": "examples"})
    """

    base_model: str = Field(
        min_length=1,
        description="Folder of the frozen base model, relative to the YAML's folder, or its id on the "
        "Hugging Face hub.",
    )
    output_dir: ResolvedPath = Field(description="Folder that the run writes; relative to the YAML's folder.")
    method: Method = Field(
        default="lora",
        description="`lora` trains adapters over a frozen base; `full` trains all weights of the model, "
        "as one task.",
    )
    seed: int = Field(
        default=42,
        ge=0,
        lt=2**63,
        description="Seed from which the seed of each adapter is derived, with the adapter's name.",
    )
    report_to: list[str] = Field(
        default_factory=list,
        description="Trackers: `tensorboard`, `wandb`, `mlflow`, `trackio`; `all`: those that are "
        "installed; `none`.",
    )
    run_name: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the run's group in a tracker; null: the name of `output_dir`.",
    )
    project: str | None = Field(
        default=None,
        min_length=1,
        description="Project of wandb and Trackio, experiment of MLflow; null: the tracker's own setting.",
    )
    logging_dir: ResolvedPath | None = Field(
        default=None, description="Folder of TensorBoard's files; null: `logs` in `output_dir`."
    )
    data_cache: ResolvedPath | None = Field(
        default=None, description="Folder of tokenised data; null: `mlora` below `HF_HOME`."
    )
    bf16: bool = Field(
        default=False,
        description="Whether the base model is held and computed in bfloat16; without `bf16` and `fp16`: "
        "float32.",
    )
    fp16: bool = Field(
        default=False,
        description="Whether the base model is held and computed in float16, with a loss scaler for each "
        "adapter.",
    )
    device: str | None = Field(
        default=None,
        description="`cpu`, `cuda` or `cuda:<index>`; null: CUDA if there is a GPU, else the CPU.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Whether to recompute each block in the backward pass instead of keeping its "
        "activations.",
    )
    base_gemm: Literal["aten", "onednn"] | None = Field(
        default=None,
        description="Library that multiplies by the frozen weights on a CPU; null: measured at the start,"
        " because rounding depends on it.",
    )
    pack_base: bool = Field(
        default=False,
        description="Whether to keep the frozen weights in oneDNN's own layouts, too: faster on a CPU, "
        "for about three times their memory.",
    )
    save_total_limit: int = Field(default=2, ge=1, description="Checkpoints that are kept.")
    defaults: TrainingFields = Field(
        default=TrainingFields(),
        description="Training keys of all adapters; an adapter's own keys override them.",
    )
    datasets: list[DatasetConfig] = Field(
        min_length=1, description="Data that adapters name; entries that no adapter names are not read."
    )
    sweep: SweepConfig | None = Field(
        default=None, description="Search for hyperparameters, in place of `adapters`."
    )
    adapters: list[AdapterConfig] = Field(description="Adapters to train; left out with `sweep`.")
    scheduler: SchedulerConfig = Field(default=SchedulerConfig(), description="Which adapters train at once.")
    pipeline: PipelineConfig = Field(
        default=PipelineConfig(), description="How the model is cut over devices and machines."
    )
    offload: OffloadConfig = Field(
        default=OffloadConfig(), description="Where parts of the model live while they are not used."
    )
    quantization: QuantizationConfig | None = Field(
        default=None,
        description="Format to which the base model's linear weights are quantised while they are read; "
        "null: they stay as they are.",
    )
    _folder: str = PrivateAttr(default=".")

    @property
    def base_folder(self) -> str:
        """The folder that ``base_model`` names. For a hub id, this folder does not exist."""
        return str((Path(self._folder) / self.base_model).resolve())

    @property
    def frozen_weight(self) -> str:
        """The name of the kind of the frozen weights."""
        return "packed" if self.pack_base else "plain"

    @property
    def at_once(self) -> int:
        """The largest number of the run's own tasks that train at once: all, or the sweep's ``places``."""
        return min(self.sweep.places, self.sweep.count) if self.sweep else len(self.adapters)

    def with_samples(self) -> dict[str, Any]:
        """Returns the values of the same run with sample trials as adapters in place of its sweep."""
        assert self.sweep is not None
        whole = self.model_dump() | {"sweep": None, "adapters": self.sweep.samples()}
        whole["pipeline"]["replicas"] = 1
        return whole

    @property
    def inputs(self) -> list[str]:
        """The files and folders that the run reads."""
        folders = [adapter.init_from for adapter in self.adapters if adapter.init_from]
        folders += self.sweep.folders if self.sweep else []
        return [
            *(file.path for dataset in self.datasets for file in dataset.path),
            *(dataset.chat_template for dataset in self.datasets if dataset.chat_template),
            *folders,
            self.base_model,
        ]

    def model_post_init(self, context: Any) -> None:
        """Keeps the folder in which ``base_model`` was looked for."""
        if not Path(self.base_model).is_absolute():
            self._folder = (context or {}).get("folder", ".")

    @model_validator(mode="before")
    @classmethod
    def _fill_adapters(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        defaults, adapters, sweep = _plain(data.get("defaults")), data.get("adapters"), data.get("sweep")
        fields = defaults if isinstance(defaults, dict) else {}
        known = {key: value for key, value in fields.items() if key in TrainingFields.model_fields}
        filled = dict(data)
        if isinstance(adapters, list):
            owns = [_plain(own) for own in adapters]
            filled["adapters"] = [
                {**inherited(known, own), **own} if isinstance(own, dict) else own for own in owns
            ]
        if isinstance(sweep, dict):
            filled.setdefault("adapters", [])
        return filled

    @field_validator("adapters")
    @classmethod
    def _some_adapters(cls, value: list[AdapterConfig], info: ValidationInfo) -> list[AdapterConfig]:
        if not value and info.data.get("sweep", ...) is None:
            raise ValueError("must not be empty")
        if value and info.data.get("sweep") is not None:
            raise ValueError("a sweep makes the run's adapters; remove adapters or sweep")
        return value

    @field_validator("base_model")
    @classmethod
    def _base_model(cls, value: str, info: ValidationInfo) -> str:
        if "://" in value:
            raise ValueError(f"{value} is a web address; expected a folder or a model's name on the hub")
        folder = resolve_path(value, info)
        if Path(folder).is_dir():
            return folder
        if Path(folder).is_file():
            raise ValueError(f"{folder} is a file; expected a model's folder or a model on the hub")
        beside_others = "/" in value and Path(folder).parent.is_dir()
        if beside_others or not is_hub_id(value):
            raise ValueError(f"no such folder: {folder}")
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
            raise ValueError(f"must be cpu, cuda or cuda:<index>, got {value!r}")
        return value

    @field_validator("report_to", mode="before")
    @classmethod
    def _report_to(cls, value: Any) -> Any:
        return tracker_names(value)

    @model_validator(mode="after")
    def _one_dtype(self) -> RunConfig:
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both true; choose one")
        return self

    @model_validator(mode="after")
    def _offload_serves(self) -> RunConfig:
        faults = not_served(self.method, self.offload, self.device or "cpu")
        if self.pack_base and self.offload.base == "disk":
            faults["pack_base",] = "keeps the base in memory, but offload.base is disk; remove one of them"
        if self.offload.activations in ("auto", "swap"):
            key, asked = ("offload", "activations"), self.offload.activations
            if self.gradient_checkpointing:
                faults[key] = f"{asked} says what is recomputed; remove gradient_checkpointing"
            if self.scheduler.memory_limit is not None:
                faults[key] = f"{asked} cannot be used with scheduler.memory_limit yet; remove one of them"
        if faults:
            raise wrong_keys(faults)
        return self

    @model_validator(mode="after")
    def _quantization_serves(self) -> RunConfig:
        faults = quantization_faults(self) if self.quantization else {}
        if faults:
            raise wrong_keys(faults)
        return self

    @model_validator(mode="after")
    def _method_fits(self) -> RunConfig:
        if self.method == "full":
            faults = full_faults(self)
        else:
            needs = "needs lora (PEFT's LoraConfig fields) or init_from (a PEFT folder)"
            lacking = [a.lora is None and a.init_from is None for a in self.adapters]
            faults = {("adapters", i): needs for i, lacks in enumerate(lacking) if lacks}
        if faults:
            raise wrong_keys(faults)
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> RunConfig:
        for what, names in (
            ("adapters", [a.name for a in self.adapters]),
            ("datasets", [d.name for d in self.datasets]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise wrong_key(what, f"the name {twice[0]!r} is used twice; names must differ")
        by_case: dict[str, str] = {}
        for adapter in self.adapters:  # on a case-insensitive disk their folders would be the same
            other = by_case.setdefault(adapter.name.casefold(), adapter.name)
            if other != adapter.name:
                raise wrong_key("adapters", f"{other!r} and {adapter.name!r} differ by case only")
        return self

    @model_validator(mode="after")
    def _trials_are_judged(self) -> RunConfig:
        if self.sweep:
            self.sweep.check_evaluations(self.defaults.model_dump())
        return self

    @model_validator(mode="after")
    def _every_replica_has_an_adapter(self) -> RunConfig:
        replicas, count = self.pipeline.replicas, self.at_once
        if replicas > count:
            raise wrong_key(
                "pipeline.replicas",
                f"must be at most {count}, the number of adapters that train at once, got {replicas}",
            )
        return self

    @model_validator(mode="after")
    def _datasets_serve(self) -> RunConfig:
        formats = {dataset.name: dataset.format for dataset in self.datasets}
        faults: dict[Location, str] = {}
        told: set[tuple[str, str]] = set()
        for index, adapter in enumerate(self.adapters):
            for key, reason in data_faults(adapter, formats):
                if (key, reason) not in told:  # a fault of the defaults is reported once
                    faults["adapters", index, *key.split(".")] = reason
                    told |= {(key, reason)} if key.split(".")[0] in TrainingFields.model_fields else set()
        if faults:
            raise wrong_keys(faults)
        return self


def _plain(value: Any) -> Any:
    """Returns the fields that were set on a model built in Python; any other value as it is."""
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def _objectives_of(format: str) -> list[str]:
    """Returns the names of the objectives that take data of a format."""
    return [
        name for kind, formats in FORMATS_OF.items() if format in formats for name in objectives_taking(kind)
    ]


def _named_formats(adapter: AdapterConfig, serve: Sequence[str]) -> list[str]:
    """Returns the formats to name to an adapter: those of labels only if its head predicts labels."""
    own = _format_of_labels(adapter)
    return [one for one in serve if (own or one) == one and (own or one not in OF_TASKS.values())]


def _format_of_labels(adapter: AdapterConfig) -> str | None:
    """Returns the format that an adapter's head of labels reads; None if it has no such head."""
    return OF_TASKS.get(str((adapter.lora or {}).get("task_type")))


def data_faults(adapter: AdapterConfig, formats: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the keys of an adapter that do not fit its datasets, and why."""
    for key in ("dataset", "eval_dataset"):
        name = getattr(adapter, key)
        if name is None:
            continue
        if name not in formats:
            yield key, f"no dataset is named {name!r}; {nearest(name, list(formats), 'datasets')}"
        elif adapter.assistant_only_loss and formats[name] not in WITH_MESSAGES:
            kinds = " or ".join(WITH_MESSAGES)
            yield "assistant_only_loss", f"needs a {key} of format {kinds}, got {formats[name]!r}"
        elif formats[name] not in (serve := FORMATS_OF[takes(adapter.objective)]):
            own, found = name_of(adapter.objective), formats[name]
            hint, named = "", " or ".join(_named_formats(adapter, serve))
            if not named:
                task = (adapter.lora or {})["task_type"]
                yield "objective", f"task_type {task} has a loss of its own; remove objective"
                continue
            if ":" in own and found in ("preference", "unpaired"):
                hint = "; `takes: pairs` or `takes: judged` in objective says that it reads preferences"
            elif own == CROSS_ENTROPY and not _format_of_labels(adapter) and _objectives_of(found):
                served = _objectives_of(found)
                hint = f"; `objective:` {' or '.join(served)} takes {found}"
            yield key, f"objective {own} needs a {key} of format {named}, got {found!r}{hint}"
    name = name_of(adapter.objective)
    if reads_mismatched(adapter.objective) and adapter.per_device_train_batch_size < 2:
        yield (
            "per_device_train_batch_size",
            f"must be at least 2 for objective {name}, whose KL term pairs prompts with completions of other "
            "samples of the batch",
        )
    asked = adapter.metric_for_best_model
    if asked is not None and (reason := unknown_metric(asked, adapter.objective)):
        yield "metric_for_best_model", reason
    reference = reference_of(adapter.objective)
    if reference not in (None, BASE_ROWS, START):
        yield "objective.reference", f"expected {BASE_ROWS} or {START}, got {reference!r}"
    elif reference == START and adapter.init_from is None:
        yield "objective.reference", f"{START}: add init_from, whose weights it compares with"
    found = formats.get(str(adapter.eval_dataset), WITH_PROMPTS[0])
    if adapter.eval_exact_match and found not in WITH_PROMPTS:
        kinds = " or ".join(WITH_PROMPTS)
        yield "eval_exact_match", f"needs an eval_dataset of format {kinds}, got {found!r}"
