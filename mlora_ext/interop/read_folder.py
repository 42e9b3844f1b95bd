"""Reads adapters from PEFT folders, and checks that they fit the model."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..adapters.kind import LayerSpec, one_by_one
from ..adapters.lora_config import NEEDS_DATA, START_VALUES, changes_base, check_values, init_kind
from ..adapters.registry import parameters_by_key
from ..adapters.trained_parts import TRAINED_COPY, task_heads
from ..errors import AdapterError, NamedError
from ..layers.adapter_weights import adapter_layers, check_weights, peft_keys, write_weights
from ..routing.router import router_of
from ..targets.add_remove import plan_adapter, put_on
from ..targets.entries import warn_of_trained_parts
from .peft_folder import CONFIG, OLD_WEIGHTS, PREFIX, WEIGHTS, body_names, renamed_keys
from .side_files import read_label_file

if TYPE_CHECKING:
    from peft import LoraConfig

_OF_EMBEDDINGS = {
    "lora_embedding_A": "lora_embedding_A",
    "lora_embedding_B": "lora_embedding_B",
    "token_adapter.trainable_tokens_delta": "trainable_tokens_delta",
}
"""Parameters of adapters on embeddings and heads by their keys, beside those of registered kinds."""
_WRAPPED = (".token_adapter.base_layer.", ".base_layer.", ".original_module.")
"""How PEFT's keys name the base's module inside its own."""


def load_into(model: nn.Module, name: str, folder: str | os.PathLike[str], *, seed: int = 0) -> None:
    """Reads an adapter from a PEFT folder into a converted model; see `mlora_ext.load_adapter`."""
    path = Path(folder)
    if name not in router_of(model).adapters:
        config, weights = read_adapter(model, name, path)
        put_on(model, name, config, seed=seed)
        write_weights(model, name, weights)
        warn_of_trained_parts(model, {name: config})
        return
    plan = plan_adapter(model, name, read_config(path))
    weights = _fitting_weights(model, plan, path)
    _check_same(model, name, plan)
    write_weights(model, name, weights)


@contextmanager
def adapter_folder(
    folder: Path | None, config: LoraConfig | Mapping[str, Any] | None, weights: Mapping[str, Tensor] | None
) -> Iterator[Path]:
    """Yields a PEFT folder with this config and these weights; None: those of `folder`.

    Keys of weights may lack PEFT's `base_model.model.`. Raises ValueError if there is no folder for what is
    missing.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    if folder is None and (config is None or weights is None):
        raise ValueError(
            "peft_model_id: expected a PEFT folder, or both peft_config= and adapter_state_dict= in its place"
        )
    if folder is not None and config is None and weights is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch, "adapter_state_dict")
        own: Any = read_config(folder) if config is None else config  # type: ignore[arg-type]
        own = LoraConfig(**own) if isinstance(own, Mapping) else own
        own.save_pretrained(str(given))
        patterns = {"rank_pattern": own.rank_pattern, "alpha_pattern": own.alpha_pattern}
        stored = json.loads((given / CONFIG).read_text())
        (given / CONFIG).write_text(json.dumps(stored | patterns))  # PEFT sorts them, and the first counts
        state = _stored(folder) if weights is None else weights  # type: ignore[arg-type]
        whole = {f"{PREFIX}{key.removeprefix(PREFIX)}": one.detach() for key, one in state.items()}
        save_file({key: one.contiguous().clone() for key, one in whole.items()}, given / WEIGHTS)
        yield given


def read_adapter(model: nn.Module, name: str, path: Path) -> tuple[LoraConfig, dict[str, dict[str, Tensor]]]:
    """Reads a PEFT folder for a new adapter, checks that it fits, and returns its config and its weights.

    The model, converted or not, is not changed. Raises ValueError as `mlora_ext.load_adapter` does.
    """
    config = read_config(path)
    plan = plan_adapter(model, name, config)
    weights = _fitting_weights(model, plan, path)
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


def read_config(path: Path) -> LoraConfig:
    """Reads the config of a PEFT folder, without an initialisation method that no longer matters.

    Raises ValueError if it is not one of a LoRA adapter, or has fields that the installed PEFT does not know.
    """
    from peft import LoraConfig

    if not (path / CONFIG).is_file():
        inside = sorted(config.parent.name for config in path.glob(f"*/{CONFIG}"))
        hint = f"give one of its subfolders: {', '.join(inside)}" if inside else "give a PEFT folder"
        raise NamedError("folder", f"{path} has no {CONFIG}; {hint}")
    try:
        stored = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise NamedError("folder", f"{path / CONFIG} is not valid JSON: {error}") from error
    kind = stored.get("peft_type") if isinstance(stored, dict) else stored
    if kind != "LORA":
        raise NamedError("folder", f"{path} has an adapter of type {kind!r}, expected 'LORA'")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    for field, value in stored.items():
        # PEFT drops a newer version's fields with a warning; they may change what the adapter computes.
        if field not in known and value:
            raise NamedError(
                "folder", f"{path / CONFIG}: the installed PEFT does not know {field}={value!r}; upgrade PEFT"
            )
    try:
        config = LoraConfig.from_pretrained(str(path))
    except (TypeError, ValueError, AttributeError) as error:
        raise NamedError("folder", f"{path / CONFIG}: PEFT cannot read it: {error}") from error
    assert isinstance(config, LoraConfig)
    config.inference_mode = False  # PEFT writes True into every folder
    try:
        check_values(config)
    except ValueError as error:
        raise NamedError("folder", f"{path / CONFIG}: {error}") from error
    if (reason := changed_base(config)) is not None:
        raise NamedError("folder", f"{path}: {reason}")
    labels = _labels_of(path, config)
    if labels is not None:
        config.__dict__.update(num_labels=labels, **read_label_file(path, labels))
    return without_start(config)


def _labels_of(path: Path, config: LoraConfig) -> int | None:
    """Returns the number of labels of the head in a folder; None if its task or the folder has no head."""
    keys = [f"{PREFIX}{head}.weight" for head in task_heads(config)]
    if not keys or not any((path / name).is_file() for name in (WEIGHTS, OLD_WEIGHTS)):
        return None
    shapes = _shapes(path, keys)
    return next((shapes[key][0] for key in keys if key in shapes), None)


def _shapes(path: Path, keys: Sequence[str]) -> dict[str, Sequence[int]]:
    """Returns the shapes of those of some tensors that a folder holds, by their keys."""
    from safetensors import SafetensorError, safe_open

    if not (path / WEIGHTS).is_file():
        return {key: tensor.shape for key, tensor in _stored(path).items() if key in keys}
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            return {key: file.get_slice(key).get_shape() for key in file.keys() if key in keys}  # noqa: SIM118
    except SafetensorError as error:
        raise _unreadable(path, error) from error


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
    tied = {f"{layer}.weight": spec.tied_to for layer, spec in plan.items() if spec.kind == TRAINED_COPY}
    places |= {own: (source, "weight") for own, source in tied.items() if source}
    copied = tuple(f"{layer}.{own}" for layer, spec in plan.items() for own in _repeated(spec))
    layers: dict[str, dict[str, Tensor]] = {}
    others = {}
    own_body, stored_body = body_names(model, plan)
    for key, tensor in renamed_keys(_stored(path), PREFIX, stored_body, own_body).items():
        own = key.removeprefix(PREFIX)
        layer, part = places.get(own) or _place_of(own)
        if part:
            if not tensor.float().isfinite().all():
                raise NamedError("folder", f"{path}: the tensor {key} contains NaN or infinity")
            if not torch.equal(layers.setdefault(layer, {}).setdefault(part, tensor), tensor):
                raise NamedError(
                    "folder",
                    f"{path}: {key} differs from the weight of {layer}, and ensure_weight_tying says "
                    "that they are one",
                )
        elif not own.startswith(copied):
            others[key] = tensor
    for layer, parts in layers.items():
        for pair in ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"}):
            if len(pair & set(parts)) == 1:
                raise NamedError("folder", f"{path} has only {', '.join(parts)} of layer {layer}")
    return layers, others


def _stored(path: Path) -> dict[str, Tensor]:
    """Returns the tensors in a folder by their keys."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if (path / WEIGHTS).is_file():
        try:
            found: dict[str, Tensor] = load_file(str(path / WEIGHTS))
            return found
        except SafetensorError as error:
            raise _unreadable(path, error) from error
    if (path / OLD_WEIGHTS).is_file():
        return _unpickled(path / OLD_WEIGHTS)
    raise NamedError("folder", f"{path} has neither {WEIGHTS} nor {OLD_WEIGHTS}")


def _unreadable(path: Path, error: Exception) -> NamedError:
    return NamedError("folder", f"{path / WEIGHTS} cannot be read: {error}")


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise NamedError("folder", f"{path} cannot be read: it is damaged or holds no weights") from error
    if not isinstance(state, dict):
        raise NamedError("folder", f"{path}: expected a dict of tensors by name, got {type(state).__name__}")
    for key, tensor in state.items():
        if not (isinstance(key, str) and isinstance(tensor, Tensor)):
            raise NamedError("folder", f"{path}: expected a dict of tensors by name, got an entry {key!r}")
    return dict(state)


def _place_of(key: str) -> tuple[str, str]:
    """Returns the names of the layer and the Parameter that a key is of; no Parameter if it is of none."""
    for end, parameter in (parameters_by_key() | _OF_EMBEDDINGS).items():
        if key.endswith(f".{end}"):
            return key.removesuffix(f".{end}"), parameter
    return key, ""


def _repeated(spec: LayerSpec) -> tuple[str, ...]:
    """Returns how the keys begin under which PEFT repeats resized embeddings in a module that is trained."""
    return ("original_module.", "modules_to_save.") if spec.kind == TRAINED_COPY else ()


def _fitting_weights(
    model: nn.Module, plan: Mapping[str, LayerSpec], path: Path
) -> dict[str, dict[str, Tensor]]:
    """Returns a folder's weights; raises ValueError if the model does not have the folder's other tensors.

    PEFT also stores the head and embeddings if they are targeted or resized.
    """
    weights, tensors = _read_weights(model, plan, path)
    base = dict(model.named_parameters(remove_duplicate=False)) if tensors else {}
    for key, tensor in tensors.items():
        plain = key.removeprefix(PREFIX)
        for wrapped in _WRAPPED:
            plain = plain.replace(wrapped, ".")
        own = base.get(plain)
        if own is None:
            raise NamedError(
                "folder", f"{path} contains the tensor {key}, which is not part of a plain LoRA adapter"
            )
        # A tensor on the meta device is compared in the process that holds it.
        differs = not own.is_meta and not torch.equal(own.detach().cpu(), tensor.to(own.dtype))
        if own.shape != tensor.shape or differs:
            raise NamedError(
                "folder",
                f"{path}: its base weight {key} {list(tensor.shape)} differs from this model's "
                f"{list(own.shape)}; load the base model that the adapter was trained on",
            )
    return weights


def _check_same(model: nn.Module, name: str, plan: Mapping[str, LayerSpec]) -> None:
    """Raises ValueError if a folder cannot hold the model's adapter of this name.

    It has a base of its own, of which no folder holds the two halves, or another scaling: the same weights
    under another scaling are another adapter.
    """
    layers = adapter_layers(model, name)
    if any(name in layer.own_bases for layer in layers.values()):
        how = router_of(model).adapters[name].config.init_lora_weights
        raise AdapterError(
            name,
            f"began with init_lora_weights={how!r}, and folders hold plain LoRA; load the "
            "folder under another name",
        )
    own = one_by_one({key: layer.specs[name] for key, layer in layers.items()})
    for key, spec in one_by_one(plan).items():
        if key in own and spec.scaling != own[key].scaling:
            raise AdapterError(
                name,
                f"layer {key}: the model's adapter has scaling {own[key].scaling:g}, the "
                f"folder's has {spec.scaling:g}; load the folder under another name, or add the adapter with "
                "the folder's lora_alpha, r and use_rslora",
            )


def without_start(config: LoraConfig) -> LoraConfig:
    """Returns a copy without the initialisation method, if it changed only the first values of A and B.

    One that also changed the base stays in the config; see `changed_base`.
    """
    config, how = copy.deepcopy(config), init_kind(config)
    for kind, field in NEEDS_DATA.items():
        if kind != how or kind in START_VALUES:
            setattr(config, field, None)
    if how in START_VALUES:
        config.init_lora_weights = True
    return config


def changed_base(config: LoraConfig) -> str | None:
    """Returns why an adapter of PEFT is refused whose initialisation has changed its base's weights."""
    if not changes_base(config) and init_kind(config) != "loftq":
        return None
    return (
        f"init_lora_weights={config.init_lora_weights!r} is not supported for an adapter of "
        "PEFT: with it PEFT changes base weights, which all adapters share; make a plain LoRA folder "
        "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), or begin anew on "
        "the original base with mlora_ext.convert_model"
    )
