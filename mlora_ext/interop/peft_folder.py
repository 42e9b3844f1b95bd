"""Writes adapters as PEFT folders: adapter_config.json and adapter_model.safetensors.

PEFT loads a folder over the class with the adapter's head, which may call the model's body otherwise, and the
folder has its names: `LlamaForQuestionAnswering` calls `transformer` what `LlamaForCausalLM` calls `model`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..adapters.registry import kind_for
from ..adapters.trained_parts import TRAINED_COPY, with_task_heads
from ..errors import AdapterError, NamedError
from ..layers.adapter_weights import adapter_layers
from ..layers.copies import TaskHeads
from ..routing.router import router_of
from ..targets.entries import portable_targets
from ..targets.find import low_rank
from ..warn_caller import warn_caller
from .side_files import LABELS, QUANTIZATION, label_file, quantization_file, warn_of_unsaid

if TYPE_CHECKING:
    from peft import LoraConfig

PREFIX = "base_model.model."
CONFIG, WEIGHTS, OLD_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


def save_adapter(
    model: nn.Module,
    name: str,
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor] | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes an adapter as a folder that `PeftModel.from_pretrained` loads.

    Embeddings with another number of rows than in the base's folder are saved with it, with a warning. Over a
    base that Transformers quantised while it loaded, the folder has `quantization.json`, too. If that file
    cannot hold how the base is quantised, there is none, and a warning at the end says so. All files are
    first written under a temporary name beside the folder and then renamed. A new folder appears whole or
    not at all. In an existing folder the adapter's files are replaced and other files stay.

    Args:
        model: converted by `convert_model`.
        name: of the adapter.
        folder: to write.
        weights: of all the adapter's layers, under PEFT's keys, if some layers are on the meta device: the
            `adapter_state` of every process in one dict. Default: the model's own.
        metadata: more entries of the weights' file beside its `format`; loaders ignore them.

    Raises:
        ValueError: if the model has no adapter of this name, `folder` is a file, or `weights` lacks a tensor,
            holds one of another shape, or holds one that is not the adapter's.
        OSError: if the disk is full or the folder is not writable; what was there before stays.

    Example:
        >>> save_adapter(model, "a", "out/a")
        >>> PeftModel.from_pretrained(base, "out/a")
    """
    write_folder(model, name, folder, weights, resized_embeddings(model), metadata)
    warn_of_unsaid(model)


def write_folder(
    model: nn.Module,
    name: str,
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor] | None,
    embeddings: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Does `save_adapter` with these embeddings, `{"model.embed_tokens.weight": [vocabulary, d]}`.

    It does not warn.
    """
    router_of(model).check_names("name", [name])
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise NamedError("folder", f"{target} is a file; give a folder")
    state = _state(model, name, weights, embeddings)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{os.urandom(8).hex()}"
    scratch.mkdir()
    try:
        _write(model, name, scratch, state, metadata or {})
        _move_into(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Returns an adapter's weights as contiguous copies on the CPU, without those of other processes (meta).

    `{"base_model.model.<layer>.lora_A.weight": [r, d_in], "... .lora_B.weight": [d_out, r]}`
    """
    keys = peft_names(model, name)
    return {
        keys[key][part]: own.detach().to("cpu", copy=True).contiguous()
        for key, layer in adapter_layers(model, name).items()
        for part, own in layer.tensors_of(name).items()
        if not own.is_meta
    }


def adapter_config(model: nn.Module, name: str) -> LoraConfig:
    """Returns the LoraConfig of an adapter's folder, whose targets PEFT resolves to the same layers."""
    config = with_task_heads(router_of(model).adapters[name].config)
    config = kind_for(name, config).exported_config(config)
    every = adapter_layers(model, name)
    layers = low_rank({key: layer.specs[name] for key, layer in every.items()})
    for field, value in portable_targets(model, config, list(layers)).items():
        setattr(config, field, value)
    own, theirs = body_names(model, every)
    if own != theirs:  # PEFT also takes the ends of names
        config.target_modules = [one.removeprefix(f"{own}.") for one in config.target_modules or ()]
    if not config.target_parameters:
        names = {key: key.removeprefix(f"{own}.") if own != theirs else key for key in layers}
        config.rank_pattern = in_any_order(config.rank_pattern or {}, names)
        config.alpha_pattern = in_any_order(config.alpha_pattern or {}, names)
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


def in_any_order(pattern: dict[str, int], names: Mapping[str, str]) -> dict[str, int]:
    """Returns a `rank_pattern` or `alpha_pattern` that says the same whatever the order of its keys.

    The first key that matches a layer counts, and PEFT sorts the keys when it writes a config. `names` are
    the names of the layers for a pattern, by those in the model.
    """
    from peft.utils.other import get_pattern_key

    given = {key: get_pattern_key(list(pattern), key) for key in names}
    if all(get_pattern_key(sorted(pattern), key) == first for key, first in given.items()):
        return pattern
    return {names[key]: pattern[first] for key, first in given.items() if first in pattern}


def _state(
    model: nn.Module, name: str, weights: Mapping[str, Tensor] | None, embeddings: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the tensors of an adapter's folder by PEFT's keys; raises ValueError if weights do not fit."""
    layers, keys = adapter_layers(model, name), peft_names(model, name)
    given = adapter_state(model, name) if weights is None else weights
    shapes = {
        keys[key][part]: list(tensor.shape)
        for key, layer in layers.items()
        for part, tensor in layer.tensors_of(name).items()
    }
    for whole in [*shapes, *given]:
        if whole not in given:
            raise AdapterError(
                name,
                f"tensor {whole} is missing in this process; pass the tensors of all processes as weights=",
            )
        if whole not in shapes:
            raise ValueError(f"weights: adapter {name!r} has no tensor {whole}")
        if list(given[whole].shape) != shapes[whole]:
            raise ValueError(
                f"weights: {whole}: expected shape {shapes[whole]}, got {list(given[whole].shape)}"
            )
    state: dict[str, Tensor] = {}
    for key, layer in layers.items():
        own = {part: given[whole].detach().contiguous() for part, whole in keys[key].items()}
        state |= {keys[key][part]: one.contiguous() for part, one in layer.exported(name, own).items()}
    specs = {key: layer.specs[name] for key, layer in layers.items()}
    for key, spec in specs.items():  # a folder holds a tied copy under the name of each layer
        if spec.tied_to and spec.kind == TRAINED_COPY:
            state[f"{PREFIX}{key}.weight"] = state[f"{PREFIX}{spec.tied_to}.weight"].clone()
    for key, tensor in embeddings.items():
        layer_key, _, parameter = key.rpartition(".")
        if layer_key in specs and specs[layer_key].kind == TRAINED_COPY:
            continue  # the adapter's copy takes its place
        base = ".base_layer" if layer_key in specs else ""
        state[f"{PREFIX}{layer_key}{base}.{parameter}"] = tensor.to("cpu", copy=True).contiguous()
    return renamed_keys(state, PREFIX, *body_names(model, layers))


def peft_names(model: nn.Module, name: str) -> dict[str, dict[str, str]]:
    """Returns PEFT's key of each of an adapter's tensors, by the layer's and the Parameter's name."""
    return {
        key: {part: f"{PREFIX}{key}.{own}" for part, own in layer.peft_keys(layer, layer.specs[name]).items()}
        for key, layer in adapter_layers(model, name).items()
    }


def _write(
    model: nn.Module, name: str, folder: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    adapter_config(model, name).save_pretrained(str(folder))
    # Written here and not by safetensors, so that a full disk is an OSError.
    with open(folder / WEIGHTS, "wb") as out:
        out.writelines(weights_file(state, metadata))
    labels = label_file(router_of(model).adapters[name].config)
    if labels is not None:
        (folder / LABELS).write_text(labels, encoding="utf-8")
    quantization = quantization_file(model)
    if quantization is not None:
        (folder / QUANTIZATION).write_text(quantization, encoding="utf-8")
    for file in folder.iterdir():
        _sync(file)


def weights_file(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, memoryview]:
    """Returns the content of a safetensors file in two pieces, the same bytes each time.

    safetensors itself writes several entries of metadata in any order.
    """
    from safetensors.torch import save

    content = save(dict(state))
    begin = 8 + int.from_bytes(content[:8], "little")
    header = {"__metadata__": {**metadata, "format": "pt"}, **json.loads(content[8:begin])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, memoryview(content)[begin:]


def _move_into(scratch: Path, target: Path) -> None:
    """Renames the finished folder into place; in an existing folder, replaces the files, weights first."""
    if target.exists():
        more = {name: (scratch / name).exists() for name in (LABELS, QUANTIZATION)}
        for name in (WEIGHTS, CONFIG, *(name for name, there in more.items() if there)):
            os.replace(scratch / name, target / name)
        for name in (OLD_WEIGHTS, *(name for name, there in more.items() if not there)):
            (target / name).unlink(missing_ok=True)
    else:
        os.rename(scratch, target)
    _sync(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk, where the file system can do that."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


def body_names(model: nn.Module, layers: Iterable[str]) -> tuple[str, str]:
    """Returns what the model calls its body, and what the folder of an adapter on these layers calls it."""
    for key in layers:
        layer = model.get_submodule(key)
        if isinstance(layer, TaskHeads):
            return layer.body
    return "", ""


def renamed_keys(state: Mapping[str, Tensor], prefix: str, old: str, new: str) -> dict[str, Tensor]:
    """Returns tensors under keys that begin with `prefix` and `new` where they began with `old`."""
    if old == new:
        return dict(state)
    start = f"{prefix}{old}."
    return {
        f"{prefix}{new}.{key.removeprefix(start)}" if key.startswith(start) else key: tensor
        for key, tensor in state.items()
    }


def check_body_names(config: LoraConfig, own: str, theirs: str, kind: str) -> None:
    """Raises ValueError if a config names modules by the body's name, which PEFT would not find.

    `target_modules` may do so: folders hold the names of the layers that they mean. `kind` is the class with
    the head.
    """
    rows: Any = config.trainable_token_indices
    fields: dict[str, Iterable[str]] = {
        "modules_to_save": config.modules_to_save or (),
        "trainable_token_indices": rows if isinstance(rows, dict) else (),
        "target_parameters": config.target_parameters or (),
        "rank_pattern": config.rank_pattern or (),
        "alpha_pattern": config.alpha_pattern or (),
    }
    for field, names in fields.items():
        for name in names:
            if own != theirs and name.startswith(f"{own}."):
                raise ValueError(
                    f"{field}: {name!r} names the body {own!r}, which {kind} calls {theirs!r}; leave out "
                    f"{own + '.'!r}"
                )


def resized_embeddings(model: nn.Module, state_dict: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns input and output embeddings, with a warning, if the vocabulary is not that of the stored base.

    `{"model.embed_tokens.weight": [vocabulary, d], ...}`, keys as in the model's state dict. Empty if the
    sizes are equal, if the stored base is not found, or if another process holds the embeddings. `state_dict`
    replaces the model's own; embeddings that it lacks are left out.
    """
    config: Any = getattr(model, "config", None)
    stored, own = _stored_vocabulary(config), _vocabulary(config)
    if stored is None or own is None or stored == own:
        return {}
    getters = [getattr(model, f"get_{side}_embeddings", lambda: None) for side in ("input", "output")]
    layers = [layer for layer in (getter() for getter in getters) if layer is not None]
    found = {
        f"{name}.{key}": parameter.detach()
        for name, module in model.named_modules(remove_duplicate=False)
        if any(module is layer for layer in layers)
        for key, parameter in module.named_parameters(recurse=False)
    }
    if state_dict is not None:
        found = {key: state_dict[key].detach() for key in found if key in state_dict}
    found = {key: tensor for key, tensor in found.items() if not tensor.is_meta}
    if found:
        warn_caller(
            f"the model's vocabulary has {own} tokens, that of the base in {config._name_or_path} has "
            f"{stored}: {', '.join(found)} are saved with the adapter"
        )
    return found


def _vocabulary(config: Any) -> int | None:
    """Returns the number of tokens in a Transformers config; None if it names none or several."""
    try:
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
    except ValueError:  # several of its parts have a vocabulary
        return None
    return getattr(text, "vocab_size", None)


def _stored_vocabulary(config: Any) -> int | None:
    """Returns the number of tokens of the folder or cached model that the base was read from, if any."""
    if _vocabulary(config) is None or not getattr(config, "_name_or_path", ""):
        return None
    try:
        return _vocabulary(type(config).from_pretrained(config._name_or_path, local_files_only=True))
    except (OSError, ValueError):
        return None
