"""Loads a base model, checked, frozen and converted: all of it, or one stage.

A stage's tensors are read from the checkpoint by name, never those of other stages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
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

import mlora_ext
from mlora.model.base_model import BaseModel, take_apart
from mlora.model.cut import Cut, Span, cut_model
from mlora.model.pretrained import load_whole, refuse_missing, skeleton, told_in_one_line
from mlora.model.probe import check_packing
from mlora.model.tensor_file import TensorFile

_SAMPLE = 1 << 16  # bytes


def load_base(
    source: str | Path | PreTrainedModel, device: torch.device, dtype: torch.dtype, span: Span | None = None
) -> BaseModel:
    """Loads a causal language model, checks that packed rows give its logits, freezes and converts it.

    Args:
        source: a folder, a hub id, or a model of this dtype, which is converted in place.
        span: the stage to load and check without the rest; default: the whole model.

    Raises:
        ValueError: it cannot be loaded or cut, or packed rows give other logits; in one line.
    """
    if span is not None and span.stages == 1:
        span = None
    cut = None
    if isinstance(source, PreTrainedModel):
        model = source
        cut = None if span is None else cut_model(model, span)
    elif span is None:
        model = load_whole(str(source), dtype)
    else:
        cut = load_stage(str(source), span, device, dtype)
        model = cut.model
    given = next(p.dtype for p in model.parameters() if cut is None or not p.is_meta)
    if given != dtype:
        raise ValueError(f"base_model: expected weights of dtype {dtype}, got {given}; pass dtype={given}")
    if cut is None:
        model.to(device)  # type: ignore[arg-type]
    else:
        stage_to(model, device)
    base = take_apart(model, cut)
    check_packing(base)
    mlora_ext.convert_model(model, {}, every_linear=True)
    return base


def load_stage(source: str, span: Span, device: torch.device, dtype: torch.dtype) -> Cut:
    """Builds a model's skeleton and reads the weights of one stage into it; in evaluation mode.

    From the hub, only files with weights of this stage are fetched. The weights have the bits that
    `from_pretrained` gives them; Transformers keeps some in fp32 whatever `dtype` is. ValueError if the model
    cannot be loaded, is quantized, has no safetensors, or weights are missing.
    """
    model = skeleton(source, dtype)
    cut = cut_model(model, span)
    with told_in_one_line(source), ExitStack() as stack:
        files = _files(source, getattr(model.config, "transformers_weights", None))
        missing = _fill(cut, _open(source, _wanted(cut, files), files, stack), device, dtype)
    refuse_missing(source, missing)
    return cut


def stage_to(model: PreTrainedModel, device: torch.device) -> None:
    """Moves a cut model to a device; tensors on the meta device stay there."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def digest(source: str) -> str:
    """Returns a short fingerprint of a model's weights, from the sizes and a few bytes of their files.

    For a hub id it is the revision.
    """
    folder = Path(source)
    if not folder.is_dir():
        return Path(_cached(source, "config.json") or "").parent.name
    found, files = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    if not files:
        return f"missing: there is no *.safetensors in {folder}"
    for path in files:
        size = path.stat().st_size
        found.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in (0, size // 2, max(0, size - _SAMPLE)):
                file.seek(place)
                found.update(file.read(_SAMPLE))
    return found.hexdigest()[:16]


class _Lazy:
    """A tensor in a file, read when it is indexed, like safetensors' slices."""

    def __init__(self, file: TensorFile, key: str) -> None:
        self._file, self._key = file, key

    def __getitem__(self, _: object) -> Tensor:
        return self._file.read(self._key)


def _files(source: str, named: str | None) -> dict[str, str]:
    """Returns the file name of each tensor of a checkpoint, by the tensor's key."""
    wholes = [SAFE_WEIGHTS_NAME] if named is None else [named] if named.endswith(".safetensors") else []
    for name in wholes:
        path = _cached(source, name)
        if path is not None:
            with TensorFile(path) as file:
                return dict.fromkeys(file.keys(), name)
    index = _cached(source, SAFE_WEIGHTS_INDEX_NAME if named is None else named)
    if index is None:
        found = f", only {WEIGHTS_NAME}" if (Path(source) / WEIGHTS_NAME).is_file() else ""
        raise ValueError(
            f"it has no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}{found}; several stages need "
            "safetensors files: save the model with save_pretrained"
        )
    weight_map: dict[str, str] = json.loads(Path(index).read_text())["weight_map"]
    return weight_map


def _cached(source: str, name: str) -> str | None:
    """Returns a file's path in the folder or the hub's cache, fetched if needed; None if there is none."""
    path: str | None = cached_file(
        source, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_gated_repo=True
    )
    return path


def _open(
    source: str, wanted: Mapping[str, str], files: Mapping[str, str], stack: ExitStack
) -> dict[str, Any]:
    """Returns lazy tensors by key or name; `wanted` maps it to the key that is read."""
    handles: dict[str, TensorFile] = {}
    for key in wanted.values():
        name = files[key]
        if name not in handles:
            path = _cached(source, name)
            if path is None:
                raise ValueError(f"the file {name} is missing")
            handles[name] = stack.enter_context(TensorFile(path))
    return {name: _Lazy(handles[files[key]], key) for name, key in wanted.items()}


def _wanted(cut: Cut, files: Mapping[str, str]) -> dict[str, str]:
    """Returns the checkpoint's keys that this stage needs, by the key or name under which each is loaded.

    A tied weight is stored once, under any of its names.
    """
    names = cut.model.state_dict()
    targets = _targets(cut.model, files, names)
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


def _targets(model: PreTrainedModel, keys: Iterable[str], names: dict[str, Tensor]) -> dict[str, str]:
    """Returns the model's name for each checkpoint key; the first one if a conversion makes several."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, targets = model.base_model_prefix, {}
    for key in keys:
        targets[key], _ = rename_source_key(key, renamings, converters, prefix, names)
        if targets[key] not in names and key in names:
            targets[key], _ = rename_source_key(key, [], [], prefix, names)
    return targets


def _missing(cut: Cut, names: set[str]) -> list[str]:
    """Returns the names that were not read although this stage needs them."""
    ignored = [re.compile(pattern) for pattern in cut.model._keys_to_ignore_on_load_missing or ()]
    return sorted(
        name for name in names if cut.holds(name) and not any(pattern.search(name) for pattern in ignored)
    )


def _fill(cut: Cut, tensors: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> list[str]:
    """Reads the tensors into the model with Transformers' own conversion of old and fused weights.

    Returns:
        The names of the stage's weights that the checkpoint lacks.
    """
    model = cut.model
    options = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=cast("Any", get_model_conversion_mapping(model)),
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
