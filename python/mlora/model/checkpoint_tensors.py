"""Which tensors of a checkpoint a stage needs, and where they lie in its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, cached_file

from mlora.model.base_info import weight_map
from mlora.model.cut import Cut
from mlora.model.tensor_file import TensorFile


class _Lazy:
    """A tensor in a file, read when it is indexed, like safetensors' slices."""

    def __init__(self, file: TensorFile, key: str) -> None:
        self._file, self._key = file, key

    def __getitem__(self, _: object) -> Tensor:
        return self._file.read(self._key)

    def get_dtype(self) -> str:
        return self._file.kind(self._key)


def files_of(source: str, named: str | None) -> dict[str, str]:
    """Returns the file name of each tensor of a checkpoint, by the tensor's key."""
    wholes = [SAFE_WEIGHTS_NAME] if named is None else [named] if named.endswith(".safetensors") else []
    for name in wholes:
        path = cached_path(source, name)
        if path is not None:
            with TensorFile(path) as file:
                return dict.fromkeys(file.keys(), name)
    index = cached_path(source, SAFE_WEIGHTS_INDEX_NAME if named is None else named)
    if index is None:
        found = f", only {WEIGHTS_NAME}" if (Path(source) / WEIGHTS_NAME).is_file() else ""
        raise ValueError(
            f"it has no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}{found}; several stages, and a "
            "base on disk, need safetensors files: save the model with save_pretrained"
        )
    return weight_map(Path(index))


def cached_path(source: str, name: str) -> str | None:
    """Returns a file's path in the folder or the hub's cache, fetched if needed; None if there is none."""
    path: str | None = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=True
    )
    return path


def open_tensors(
    source: str, wanted: Mapping[str, str], files: Mapping[str, str], stack: ExitStack
) -> dict[str, Any]:
    """Returns lazy tensors by key or name; `wanted` maps it to the key that is read."""
    handles: dict[str, TensorFile] = {}
    for key in wanted.values():
        name = files[key]
        if name not in handles:
            path = cached_path(source, name)
            if path is None:
                raise ValueError(f"the file {name} is missing")
            handles[name] = stack.enter_context(TensorFile(path))
    return {name: _Lazy(handles[files[key]], key) for name, key in wanted.items()}


def _conversions(model: PreTrainedModel) -> list[Any]:
    """Returns Transformers' conversions of a checkpoint's tensors, with those of quantised ones."""
    return get_model_conversion_mapping(model, None, getattr(model, "hf_quantizer", None))  # type: ignore[return-value]


def wanted_keys(cut: Cut, files: Mapping[str, str]) -> dict[str, str]:
    """Returns the checkpoint's keys that this stage needs, by the key or name under which each is loaded.

    A tied weight is stored once, under any of its names.
    """
    names = cut.model.state_dict()
    targets = targets_of(cut.model, files, names)
    wanted = {key: key for key, name in targets.items() if name in names and cut.holds(name)}
    keys = {name: key for key, name in targets.items()}
    for name, other in _ties(cut.model):
        if cut.holds(name) and name not in keys and other in keys:
            wanted.setdefault(name, keys[other])
    return wanted


def _ties(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """Yields pairs of names of one tied weight, in both orders."""
    groups: dict[str, list[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, [source]).append(target)
    for group in groups.values():
        yield from ((name, other) for name in group for other in group if name != other)


def targets_of(
    model: PreTrainedModel,
    keys: Iterable[str],
    names: dict[str, Tensor],
    mapping: Sequence[Any] | None = None,
) -> dict[str, str]:
    """Returns the model's name for each checkpoint key; the first one if a conversion makes several."""
    mapping = _conversions(model) if mapping is None else mapping
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, targets = model.base_model_prefix, {}
    for key in keys:
        targets[key], _ = rename_source_key(key, renamings, converters, prefix, names)
        if targets[key] not in names and key in names:
            targets[key], _ = rename_source_key(key, [], [], prefix, names)
    return targets


def plain_keys(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Returns the model's name for each key whose tensor is loaded without a conversion."""
    return _plain_keys(model, keys, model.state_dict(), _conversions(model))


def original_keys(model: PreTrainedModel, keys: Iterable[str], layers: Iterable[str]) -> dict[str, str]:
    """Returns the key of each layer's weight in the checkpoint of the model that was not quantised yet."""
    names = {f"{layer}.weight": torch.empty(0, device="meta") for layer in layers}
    mapping: Any = get_model_conversion_mapping(model)
    found = _plain_keys(model, keys, names, mapping)
    return {name.removesuffix(".weight"): key for key, name in found.items() if name in names}


def _plain_keys(
    model: PreTrainedModel, keys: Iterable[str], names: dict[str, Tensor], mapping: Sequence[Any]
) -> dict[str, str]:
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    found = {}
    for key, name in targets_of(model, keys, names, mapping).items():
        _, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        if pattern is None:
            found[key] = name
    return found


def _missing(cut: Cut, names: set[str]) -> list[str]:
    """Returns the names that were not read although this stage needs them."""
    ignored = [re.compile(pattern) for pattern in cut.model._keys_to_ignore_on_load_missing or ()]
    return sorted(
        name for name in names if cut.holds(name) and not any(pattern.search(name) for pattern in ignored)
    )


def fill(cut: Cut, tensors: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> list[str]:
    """Reads the tensors into the model with Transformers' own conversion of old and fused weights.

    Returns:
        The names of the stage's weights that the checkpoint lacks.
    """
    model = cut.model
    options = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        hf_quantizer=getattr(model, "hf_quantizer", None),
        weight_mapping=cast("Any", _conversions(model)),
    )
    info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), options)
    if info.mismatched_keys:
        name, got, expected = min(info.mismatched_keys)
        raise ValueError(f"{name}: expected shape {list(expected)}, got {list(got)}")
    faults = [*info.error_msgs, *info.conversion_errors.values()]
    if faults:
        raise ValueError(faults[0])
    stage_to(model, device)
    return _missing(cut, info.missing_keys)


def stage_to(model: PreTrainedModel, device: torch.device) -> None:
    """Moves a cut model to a device; tensors on the meta device stay there."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
