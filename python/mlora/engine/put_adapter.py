"""Completes adapters' configs, puts adapters on a model, and makes configs plain for other processes."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import mlora_ext
from mlora.model.labels import add_labels, check_labels
from mlora.model.task_heads import check_heads, prepare_head
from mlora_ext.adapters.registry import kind_for
from mlora_ext.adapters.trained_parts import LABEL_FIELDS, labels_of
from mlora_ext.errors import AdapterError
from mlora_ext.interop.read_folder import load_into, read_config
from mlora_ext.targets.add_remove import put_on
from mlora_ext.targets.entries import warn_of_trained_parts

if TYPE_CHECKING:
    from peft import LoraConfig


def put_adapter(
    model: nn.Module, name: str, lora: LoraConfig | None, init_from: str | None, seed: int
) -> None:
    """Puts an adapter on a converted model or a stage's piece of it; on an error the model stays as it was.

    `lora=None` takes the config of `init_from`, a PEFT folder with initial weights. `seed` is of initial
    weights and dropout. Raises ValueError if the config is not supported, targets match nothing, or the
    folder does not fit.
    """
    prepare_head(model, lora if lora is not None else read_config(Path(str(init_from))))
    if lora is not None:
        put_on(model, name, lora, seed=seed)
        check_heads(model, name)
    if init_from is not None:
        try:
            load_into(model, name, init_from, seed=seed)
            if lora is None:
                check_heads(model, name)
        except ValueError:
            if lora is not None:
                mlora_ext.remove_adapter(model, name)
            raise
    if lora is not None:
        warn_of_trained_parts(model, {name: lora})


def plain_lora(config: LoraConfig) -> dict[str, Any]:
    """Returns a LoraConfig's values that are not defaults; `lora_of` makes it again."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    default = type(config)()
    found = {key: _plain(value) for key, value in values.items() if value != getattr(default, key, None)}
    return found | labels_of(config)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return sorted(value) if isinstance(value, set) else value


def lora_of(values: Mapping[str, Any]) -> LoraConfig:
    """Makes a LoraConfig again of what `plain_lora` returned."""
    from peft import LoraConfig

    config = LoraConfig(**{key: value for key, value in values.items() if key not in LABEL_FIELDS})
    config.__dict__.update({key: values[key] for key in LABEL_FIELDS if key in values})
    return config


def labelled(
    name: str, lora: LoraConfig | None, init_from: str | os.PathLike[str] | None, given: Mapping[str, Any]
) -> LoraConfig | None:
    """Returns an adapter's config and labels; None: that of `init_from`. ValueError if they do not fit."""
    if lora is not None:
        kind_for(name, lora)
    stored = None if init_from is None else read_config(Path(os.fspath(init_from)))
    if lora is None and any(value is not None for value in given.values()):
        lora = stored
    try:
        if lora is not None:
            lora = copy.copy(lora)
            add_labels(lora, given, stored)
        config = stored if lora is None else lora
        if config is not None:
            check_labels(config)
    except ValueError as error:
        raise AdapterError(name, str(error)) from error
    return lora
