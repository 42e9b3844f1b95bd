"""The parts of a run's config that commands show, read without what it names: that may be gone by now."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from mlora.config.sections import Size
from mlora.config.yaml_file import read_yaml
from mlora.errors import RunError, first_fault
from mlora.store.run_folder import RunFolder

_Count = Annotated[int, Field(strict=True, ge=-1, le=2**63)]


class _Stored(BaseModel):
    """What a file must hold at least; another version may write more."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Lora(_Stored):
    r: _Count | None = None
    lora_alpha: FiniteFloat | None = None
    lora_dropout: FiniteFloat | None = None
    target_modules: str | list[str] | None = None


class StoredAdapter(_Stored):
    """An adapter in ``config.yaml``, in a submission or of a trial."""

    name: str = ""
    priority: int | None = None
    max_steps: _Count | None = None
    lora: _Lora | None = None
    init_from: str | None = None
    learning_rate: FiniteFloat | None = None
    lr_scheduler_type: str | None = None
    per_device_train_batch_size: _Count | None = None
    gradient_accumulation_steps: _Count | None = None
    objective: str | dict[str, Any] | None = None
    optim: str | None = None
    dataset: str | None = None
    eval_dataset: str | None = None


class _Named(StoredAdapter):
    name: str


class _Pipeline(_Stored):
    stages: _Count = 1
    replicas: _Count = 1


class _Scheduler(_Stored):
    memory_limit: Size | None = None


class _Config(_Stored):
    base_model: str
    method: str = "lora"
    adapters: list[_Named]
    pipeline: _Pipeline | None = None
    scheduler: _Scheduler | None = None
    sweep: dict[str, Any] | None = None


def stored_config(folder: RunFolder) -> dict[str, Any]:
    """Returns the values of ``config.yaml`` as they were written; RunError if no run writes such ones."""
    try:
        return _Config.model_validate(read_yaml(folder.config)).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise RunError(f"{folder.config}: is not a run's config: {first_fault(error)}") from error


def stored_adapter(name: str, fields: Any) -> dict[str, Any]:
    """Returns the fields of an adapter in a queue as they were written; RunError likewise."""
    try:
        return StoredAdapter.model_validate(fields).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise RunError(f"{name}: its submission cannot be read: {first_fault(error)}") from error
