"""Writes an adapter's weights as the PEFT folder that a run would write, without loading the base model."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

import mlora_ext
from mlora.config.lora_fields import build_lora
from mlora.config.run_config import RunConfig
from mlora.engine.put_adapter import lora_of, put_adapter
from mlora.errors import RunError, first_line, reason_of
from mlora.model.base_info import DIGEST, BaseInfo
from mlora.model.pretrained import skeleton
from mlora.model.stored_quantization import write_quantization
from mlora.regular_files import open_regular
from mlora.run.handoff.adapters import FoundWeights, RunAdapter
from mlora.store.disk import os_errors
from mlora.tasks.task import TaskBuilder
from mlora_ext.adapters.trained_parts import task_heads
from mlora_ext.interop.peft_folder import CONFIG, PREFIX, WEIGHTS
from mlora_ext.interop.read_folder import read_config
from mlora_ext.interop.side_files import LABELS, QUANTIZATION
from mlora_ext.layers.adapter_weights import adapter_layers

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor, nn

FILES = (CONFIG, WEIGHTS, LABELS, QUANTIZATION)


def write_peft_folder(config: RunConfig, adapter: RunAdapter, found: FoundWeights, folder: Path) -> None:
    """Writes an adapter's files into a folder, which may exist.

    Raises RunError if they cannot be written, or the base model or what the adapter began with is gone.
    """
    if found.folder is not None:
        _check(found.folder)
        with os_errors(f"{folder}: cannot be saved"):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (found.folder / name for name in FILES):
            if os.path.lexists(file):
                with (
                    os_errors(f"{file}: cannot be copied to {folder}"),
                    open_regular(file, follow=False) as whole,
                    open(folder / file.name, "xb") as copy,
                ):
                    shutil.copyfileobj(whole, copy)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run has given them
            model = empty_model(config)
            put_adapter(model, found.name, _lora(config, adapter, found), None, 0)
            told = {DIGEST: found.base} if found.base else {}
            mlora_ext.save_adapter(model, found.name, folder, _weights(model, found), metadata=told)
        if config.quantization is not None:
            write_quantization(folder, config.quantization)
    except OSError as error:
        raise RunError(f"{folder}: cannot be saved: {error.strerror or first_line(error)}") from error
    except (ValueError, SafetensorError) as error:
        raise RunError(f"{found.name}: {first_line(error)}") from error


@contextmanager
def peft_folder_of(config: RunConfig, adapter: RunAdapter, found: FoundWeights) -> Iterator[Path]:
    """Yields a PEFT folder with an adapter's weights: the run's own, or one that is removed afterwards."""
    if found.folder is not None:
        _check(found.folder)
        yield found.folder
        return
    with TemporaryDirectory(prefix="mlora-") as scratch:
        write_peft_folder(config, adapter, found, Path(scratch) / found.name)
        yield Path(scratch) / found.name


def _check(folder: Path) -> None:
    """Raises RunError, naming the file, unless a folder holds the config of a LoRA adapter."""
    try:
        read_config(folder)
    except ValueError as error:
        raise RunError(first_line(reason_of(error, "folder"))) from error


def empty_model(config: RunConfig) -> nn.Module:
    """Returns a run's base model, converted, without any weight. Raises ValueError if it cannot be built."""
    model = skeleton(config.base_model, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has given them
        mlora_ext.convert_model(model, {}, every_linear=True)
    return model


def _lora(config: RunConfig, adapter: RunAdapter, found: FoundWeights) -> LoraConfig:
    """Returns the config that an adapter has in its run."""
    if "lora" in found.state:  # with the ranks that EVA has distributed
        return lora_of(found.state["lora"])
    own = adapter.config
    lora = build_lora(own.lora or {}) if own.init_from is None else read_config(Path(own.init_from))
    if task_heads(lora):  # its labels may stand in its data only
        builder = TaskBuilder(config, BaseInfo(config.base_model, config.base_folder))
        lora = builder.build(own, adapter.datasets).lora or lora
    return lora


def _weights(model: nn.Module, found: FoundWeights) -> dict[str, Tensor]:
    """Returns a state's weights under PEFT's keys."""
    stored, weights = found.state["weights"], {}
    for key, layer in adapter_layers(model, found.name).items():
        keys = layer.peft_keys(layer, layer.specs[found.name])
        for part, tensor in layer.tensors_of(found.name).items():
            own = stored.get(f"{key}.{layer.state_key(found.name, part)}", tensor)
            if own.is_meta:
                raise ValueError(f"{found.told} lacks {key}.{part}; its config has changed since")
            weights[f"{PREFIX}{key}.{keys[part]}"] = own
    return weights
