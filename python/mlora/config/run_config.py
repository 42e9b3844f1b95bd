"""The config of a run and of its adapters.

Names and defaults are those of Transformers' ``TrainingArguments`` and PEFT's ``LoraConfig``. Every key
works or is refused. `mlora.config.config_file` reads the YAML and explains faults.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from mlora.config.adapter_config import AdapterConfig
from mlora.config.conflicts import check_together
from mlora.config.dataset_config import DatasetConfig
from mlora.config.sections import Method, OffloadConfig, PipelineConfig, QuantizationConfig, SchedulerConfig
from mlora.config.strict import (
    MOST,
    ResolvedPath,
    Strict,
    is_hub_id,
    resolve_path,
)
from mlora.config.sweep_config import SweepConfig
from mlora.config.tracking import tracker_names
from mlora.config.training_fields import TrainingFields, inherited


class RunConfig(Strict):
    """A whole run, resolved: paths are absolute, and every adapter holds all of its training fields.

    ``method`` is what is trained: ``lora``, adapters over a frozen base; ``full``, all weights of the model,
    as one task. ``base_gemm`` is the library that multiplies by the frozen weights. Without it, a run on a
    CPU measures which one to take and names it in its resolved config, because rounding depends on it; on a
    GPU it takes cuBLAS. ``pack_base`` also keeps these weights in oneDNN's
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
    dataset_num_proc: int | None = Field(
        default=None, ge=1, le=MOST, description="Processes that tokenise large data; null: one."
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
    base_gemm: Literal["aten", "onednn", "cublas", "mlora", "fastest"] | None = Field(
        default=None,
        description="Library that multiplies by the frozen weights; the last three are of GPUs. null: the "
        "faster one, measured once; on a GPU `cublas`. Rounding depends on it.",
    )
    pack_base: bool = Field(
        default=False,
        description="Whether to keep the frozen weights in oneDNN's own layouts, too: faster on a CPU, "
        "for about three times their memory.",
    )
    save_total_limit: int = Field(default=2, ge=1, description="Checkpoints that are kept.")
    defaults: TrainingFields = Field(
        default=TrainingFields(),
        description="Training keys of all adapters; an adapter's own keys override them. Keys about "
        "evaluations do not apply to an adapter without `eval_dataset`.",
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
    def _goes_together(self) -> RunConfig:
        check_together(self)
        return self


def _plain(value: Any) -> Any:
    """Returns the fields that were set on a model built in Python; any other value as it is."""
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
