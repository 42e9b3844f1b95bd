"""Reads and writes adapters as PEFT folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...adapters.kind import LayerSpec, one_by_one
from ...adapters.registry import kind_for, parameters_by_key
from ...adapters.trained_parts import (
    TRAINED_COPY,
    task_heads,
    with_task_heads,
)
from ..adapter_weights import adapter_layers, check_weights, peft_keys, write_weights
from ..add_remove import add_adapter, plan_adapter
from ..routing.router import router_of
from ..targets import low_rank, portable_targets
from .embeddings import resized_embeddings
from .existing_config import refuse_changed_base, without_start

if TYPE_CHECKING:
    from peft import LoraConfig

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS, _OLD_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_OF_EMBEDDINGS = {
    "lora_embedding_A": "lora_embedding_A",
    "lora_embedding_B": "lora_embedding_B",
    "token_adapter.trainable_tokens_delta": "trainable_tokens_delta",
}
"""Parameters of adapters on embeddings and heads by their keys, beside those of registered kinds."""
_WRAPPED = (".token_adapter.base_layer.", ".base_layer.", ".original_module.")
"""How PEFT's keys name the base's module inside its own."""


def save_adapter(
    model: nn.Module,
    name: str,
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes an adapter as a folder that `PeftModel.from_pretrained` loads.

    Embeddings with another number of rows than in the base's folder are saved with it, with a warning. All
    files are first written under a temporary name beside the folder and then renamed. A new folder appears
    whole or not at all. In an existing folder the adapter's files are replaced and other files stay.

    Args:
        model: converted by `convert_model`.
        name: of the adapter.
        folder: to write.
        weights: of all the adapter's layers, under PEFT's keys, if some layers are on the meta device: the
            `adapter_state` of every process in one dict. Default: the model's own.

    Raises:
        ValueError: if the model has no adapter of this name, `folder` is a file, or `weights` lacks a tensor,
            holds one of another shape, or holds one that is not the adapter's.
        OSError: if the disk is full or the folder is not writable; what was there before stays.

    Example:
        >>> save_adapter(model, "a", "out/a")
        >>> PeftModel.from_pretrained(base, "out/a")
    """
    write_folder(model, name, folder, weights, resized_embeddings(model))


def write_folder(
    model: nn.Module,
    name: str,
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor] | None,
    embeddings: Mapping[str, Tensor],
) -> None:
    """Does `save_adapter` with these embeddings, `{"model.embed_tokens.weight": [vocabulary, d]}`."""
    router_of(model).check_names("name", [name])
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ValueError(f"folder: {target} is a file; give a folder")
    state = _exported(model, name, _whole_state(model, name, weights))
    state |= _changed_base(model, name, embeddings)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(model, name, scratch, state)
        os.chmod(scratch, 0o777 & ~_umask())
        _move_into(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Returns an adapter's weights as contiguous copies on the CPU, without those of other processes (meta).

    `{"base_model.model.<layer>.lora_A.weight": [r, d_in], "... .lora_B.weight": [d_out, r]}`
    """
    state = {}
    for key, layer in adapter_layers(model, name).items():
        for part, parameter in layer.parameters_of(name).items():
            if not parameter.is_meta:
                tensor = parameter.detach().to("cpu", copy=True).contiguous()
                state[f"{_PREFIX}{key}.{layer.peft_keys(layer, layer.specs[name])[part]}"] = tensor
    return state


def _whole_state(model: nn.Module, name: str, weights: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Returns all weights of an adapter, in the model's order; raises ValueError if they do not fit it."""
    given = adapter_state(model, name) if weights is None else weights
    shapes = {
        f"{_PREFIX}{key}.{layer.peft_keys(layer, layer.specs[name])[part]}": parameter.shape
        for key, layer in adapter_layers(model, name).items()
        for part, parameter in layer.parameters_of(name).items()
    }
    for key in [*shapes, *given]:
        if key not in given:
            raise ValueError(
                f"adapter {name!r}: tensor {key} is missing in this process; pass the tensors of all "
                "processes as weights="
            )
        if key not in shapes:
            raise ValueError(f"weights: adapter {name!r} has no tensor {key}")
        if given[key].shape != shapes[key]:
            raise ValueError(
                f"weights: {key}: expected shape {list(shapes[key])}, got {list(given[key].shape)}"
            )
    return {key: given[key].detach().contiguous() for key in shapes}


def _exported(model: nn.Module, name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an adapter's tensors as its kind writes them into a folder."""
    found = {}
    for key, layer in adapter_layers(model, name).items():
        spec = layer.specs[name]
        keys = {part: f"{_PREFIX}{key}.{own_key}" for part, own_key in layer.peft_keys(layer, spec).items()}
        own = {part: state[whole] for part, whole in keys.items()}
        for part, tensor in layer.exported(name, own).items():
            found[keys[part]] = tensor.contiguous()
    return found


def _changed_base(model: nn.Module, name: str, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns embeddings under PEFT's keys, which have `.base_layer` if the adapter sits on the embedding."""
    layers = adapter_layers(model, name)
    state = {}
    for key, tensor in embeddings.items():
        layer, _, parameter = key.rpartition(".")
        if layer in layers and layers[layer].specs[name].kind == TRAINED_COPY:
            continue  # the adapter's copy takes its place
        base = ".base_layer" if layer in layers else ""
        state[f"{_PREFIX}{layer}{base}.{parameter}"] = tensor.to("cpu", copy=True).contiguous()
    return state


def adapter_config(model: nn.Module, name: str) -> LoraConfig:
    """Returns the LoraConfig of an adapter's folder, whose targets PEFT resolves to the same layers."""
    config = with_task_heads(router_of(model).adapters[name].config)
    config = kind_for(name, config).exported_config(config)
    layers = low_rank({key: layer.specs[name] for key, layer in adapter_layers(model, name).items()})
    for field, value in portable_targets(model, config, list(layers)).items():
        setattr(config, field, value)
    config.inference_mode = True
    base = getattr(getattr(model, "config", None), "_name_or_path", None) or getattr(
        model, "name_or_path", None
    )
    config.base_model_name_or_path = base or config.base_model_name_or_path
    if config.task_type is None:
        config.auto_mapping = {
            "base_model_class": type(model).__name__,
            "parent_library": type(model).__module__,
        }
    return config


def load_into(model: nn.Module, name: str, folder: str | os.PathLike[str], *, seed: int = 0) -> None:
    """Reads an adapter from a PEFT folder into a converted model; see `mlora_ext.load_adapter`."""
    path = Path(folder)
    if name not in router_of(model).adapters:
        config, weights = read_adapter(model, name, path)
        add_adapter(model, name, config, seed=seed)
    else:
        plan = plan_adapter(model, name, read_config(path))
        weights, others = _read_weights(model, plan, path)
        _check_others(model, path, others)
        _check_start(model, name)
        _check_scaling(model, name, plan)
    write_weights(model, name, weights)


def read_adapter(model: nn.Module, name: str, path: Path) -> tuple[LoraConfig, dict[str, dict[str, Tensor]]]:
    """Reads a PEFT folder for a new adapter, checks that it fits, and returns its config and its weights.

    The model, converted or not, is not changed. Raises ValueError as `mlora_ext.load_adapter` does.
    """
    config = read_config(path)
    plan = plan_adapter(model, name, config)
    weights, others = _read_weights(model, plan, path)
    _check_others(model, path, others)
    check_weights(model, name, plan, weights)
    return config, weights


def adapter_weights(
    model: nn.Module, name: str, folder: str | os.PathLike[str]
) -> dict[str, dict[str, Tensor]]:
    """Returns the weights of a PEFT folder for an adapter of the model, by layer name and Parameter name.

    Raises ValueError if a file is missing or cannot be read, or a weight is NaN or infinite.
    """
    plan = {key: layer.specs[name] for key, layer in adapter_layers(model, name).items()}
    return _read_weights(model, plan, Path(folder))[0]


def _check_scaling(model: nn.Module, name: str, plan: Mapping[str, LayerSpec]) -> None:
    """Raises ValueError if scalings differ: the same weights under another scaling are another adapter."""
    own = one_by_one({key: layer.specs[name] for key, layer in adapter_layers(model, name).items()})
    for key, spec in one_by_one(plan).items():
        if key in own and spec.scaling != own[key].scaling:
            raise ValueError(
                f"adapter {name!r}: layer {key}: the model's adapter has scaling {own[key].scaling:g}, the "
                f"folder's has {spec.scaling:g}; load the folder under another name, or add the adapter with "
                "the folder's lora_alpha, r and use_rslora"
            )


def _check_start(model: nn.Module, name: str) -> None:
    """Raises ValueError for an adapter with a base of its own: no folder holds its two halves."""
    how = router_of(model).adapters[name].config.init_lora_weights
    if any(name in layer.own_bases for layer in adapter_layers(model, name).values()):
        raise ValueError(
            f"adapter {name!r}: began with init_lora_weights={how!r}, and folders hold plain LoRA; load the "
            "folder under another name"
        )


def _write(model: nn.Module, name: str, folder: Path, state: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save

    adapter_config(model, name).save_pretrained(str(folder))
    # Written here and not by safetensors, so that a full disk is an OSError.
    (folder / _WEIGHTS).write_bytes(save(dict(state), metadata={"format": "pt"}))
    for file in (folder / _CONFIG, folder / _WEIGHTS):
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())


def _move_into(scratch: Path, target: Path) -> None:
    """Renames the finished folder into place; in an existing folder, replaces the files, weights first."""
    if target.exists():
        for name in (_WEIGHTS, _CONFIG):
            os.replace(scratch / name, target / name)
        (target / _OLD_WEIGHTS).unlink(missing_ok=True)
    else:
        os.rename(scratch, target)
    _sync(target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def read_config(path: Path) -> LoraConfig:
    """Reads the config of a PEFT folder, without an initialisation method that no longer matters.

    Raises ValueError if it is not one of a LoRA adapter, or has fields that the installed PEFT does not know.
    """
    from peft import LoraConfig

    if not (path / _CONFIG).is_file():
        inside = sorted(config.parent.name for config in path.glob(f"*/{_CONFIG}"))
        hint = f"give one of its subfolders: {', '.join(inside)}" if inside else "give a PEFT folder"
        raise ValueError(f"folder: {path} has no {_CONFIG}; {hint}")
    try:
        stored = json.loads((path / _CONFIG).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"folder: {path / _CONFIG} is not valid JSON: {error}") from error
    kind = stored.get("peft_type") if isinstance(stored, dict) else stored
    if kind != "LORA":
        raise ValueError(f"folder: {path} has an adapter of type {kind!r}, expected 'LORA'")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    for field, value in stored.items():
        # PEFT drops a newer version's fields with a warning; they may change what the adapter computes.
        if field not in known and value:
            raise ValueError(
                f"folder: {path / _CONFIG}: the installed PEFT does not know {field}={value!r}; upgrade PEFT"
            )
    try:
        config = LoraConfig.from_pretrained(str(path))
    except TypeError as error:
        raise ValueError(f"folder: {path / _CONFIG}: PEFT cannot read it: {error}") from error
    assert isinstance(config, LoraConfig)
    config.inference_mode = False  # PEFT writes True into every folder
    refuse_changed_base(f"folder: {path}", config)
    labels = _labels_of(path, config)
    if labels is not None:
        config.__dict__["num_labels"] = labels
    return without_start(config)


def _labels_of(path: Path, config: LoraConfig) -> int | None:
    """Returns the number of labels of the head in a folder; None if its task has no linear head."""
    from safetensors import SafetensorError, safe_open

    if not task_heads(config) or not (path / _WEIGHTS).is_file():
        return None
    try:
        with safe_open(path / _WEIGHTS, "pt") as file:
            for head in task_heads(config):
                key = f"{_PREFIX}{head}.weight"
                if key in file.keys():  # noqa: SIM118  (a file, not a dict)
                    return int(file.get_slice(key).get_shape()[0])
    except SafetensorError:
        return None  # told by whoever reads the weights
    return None


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"folder: {path} cannot be read: it is damaged or holds no weights") from error
    if not isinstance(state, dict):
        raise ValueError(f"folder: {path}: expected a dict of tensors by name, got {type(state).__name__}")
    for key, tensor in state.items():
        if not (isinstance(key, str) and isinstance(tensor, Tensor)):
            raise ValueError(f"folder: {path}: expected a dict of tensors by name, got an entry {key!r}")
    return dict(state)


def _read_weights(
    model: nn.Module, plan: Mapping[str, LayerSpec], path: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Returns weights by layer name and Parameter name, and the folder's other tensors by their keys.

    `plan` holds the adapter's layers. Tensors of an adapter on other layers are among the weights, too.
    """
    places = {
        f"{layer}.{own}": (layer, part)
        for layer, spec in plan.items()
        for part, own in peft_keys(model.get_submodule(layer), spec).items()
    }
    copied = tuple(f"{layer}.{own}" for layer, spec in plan.items() for own in _repeated(spec))
    layers: dict[str, dict[str, Tensor]] = {}
    others = {}
    for key, tensor in _stored(path).items():
        own = key.removeprefix(_PREFIX)
        layer, part = places.get(own) or _place_of(own)
        if part:
            if not tensor.float().isfinite().all():
                raise ValueError(f"folder: {path}: the tensor {key} contains NaN or infinity")
            layers.setdefault(layer, {})[part] = tensor
        elif not own.startswith(copied):
            others[key] = tensor
    for layer, parts in layers.items():
        for pair in ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"}):
            if len(pair & set(parts)) == 1:
                raise ValueError(f"folder: {path} has only {', '.join(parts)} of layer {layer}")
    return layers, others


def _stored(path: Path) -> dict[str, Tensor]:
    """Returns the tensors in a folder by their keys."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if (path / _WEIGHTS).is_file():
        try:
            found: dict[str, Tensor] = load_file(str(path / _WEIGHTS))
            return found
        except SafetensorError as error:
            raise ValueError(f"folder: {path / _WEIGHTS} cannot be read: {error}") from error
    if (path / _OLD_WEIGHTS).is_file():
        return _unpickled(path / _OLD_WEIGHTS)
    raise ValueError(f"folder: {path} has neither {_WEIGHTS} nor {_OLD_WEIGHTS}")


def _place_of(key: str) -> tuple[str, str]:
    """Returns the names of the layer and the Parameter that a key is of; no Parameter if it is of none."""
    for end, parameter in (parameters_by_key() | _OF_EMBEDDINGS).items():
        if key.endswith(f".{end}"):
            return key.removesuffix(f".{end}"), parameter
    return key, ""


def _repeated(spec: LayerSpec) -> tuple[str, ...]:
    """Returns how the keys begin under which PEFT repeats resized embeddings in a module that is trained."""
    return ("original_module.", "modules_to_save.") if spec.kind == TRAINED_COPY else ()


def _check_others(model: nn.Module, path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError if the model does not have the folder's other tensors.

    PEFT also stores the head and embeddings if they are targeted or resized.
    """
    base = dict(model.named_parameters(remove_duplicate=False)) if tensors else {}
    for key, tensor in tensors.items():
        plain = key.removeprefix(_PREFIX)
        for wrapped in _WRAPPED:
            plain = plain.replace(wrapped, ".")
        own = base.get(plain)
        if own is None:
            raise ValueError(
                f"folder: {path} contains the tensor {key}, which is not part of a plain LoRA adapter"
            )
        # A tensor on the meta device is compared in the process that holds it.
        differs = not own.is_meta and not torch.equal(own.detach().cpu(), tensor.to(own.dtype))
        if own.shape != tensor.shape or differs:
            raise ValueError(
                f"folder: {path}: its base weight {key} {list(tensor.shape)} differs from this model's "
                f"{list(own.shape)}; load the base model that the adapter was trained on"
            )
