"""Writes adapters as PEFT folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..adapters.registry import kind_for
from ..adapters.trained_parts import TRAINED_COPY, with_task_heads
from ..errors import AdapterError, NamedError
from ..layers.adapter_weights import adapter_layers
from ..routing.router import router_of
from ..targets.entries import portable_targets
from ..targets.find import low_rank
from .body_names import body_names, renamed_keys
from .embeddings import resized_embeddings
from .label_files import LABELS, label_file
from .quantization_file import QUANTIZATION, quantization_file, warn_of_unsaid

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
    state = _exported(model, name, _whole_state(model, name, weights))
    state |= _tied(model, name, state)
    state |= _changed_base(model, name, embeddings)
    state = renamed_keys(state, PREFIX, *body_names(model, adapter_layers(model, name)))
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
    state = {}
    for key, layer in adapter_layers(model, name).items():
        for part, own in layer.tensors_of(name).items():
            if not own.is_meta:
                tensor = own.detach().to("cpu", copy=True).contiguous()
                state[f"{PREFIX}{key}.{layer.peft_keys(layer, layer.specs[name])[part]}"] = tensor
    return state


def adapter_config(model: nn.Module, name: str) -> LoraConfig:
    """Returns the LoraConfig of an adapter's folder, whose targets PEFT resolves to the same layers."""
    config = with_task_heads(router_of(model).adapters[name].config)
    config = kind_for(name, config).exported_config(config)
    layers = low_rank({key: layer.specs[name] for key, layer in adapter_layers(model, name).items()})
    for field, value in portable_targets(model, config, list(layers)).items():
        setattr(config, field, value)
    own, theirs = body_names(model, adapter_layers(model, name))
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


def _whole_state(model: nn.Module, name: str, weights: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Returns all weights of an adapter, in the model's order; raises ValueError if they do not fit it."""
    given = adapter_state(model, name) if weights is None else weights
    shapes = {
        f"{PREFIX}{key}.{layer.peft_keys(layer, layer.specs[name])[part]}": tensor.shape
        for key, layer in adapter_layers(model, name).items()
        for part, tensor in layer.tensors_of(name).items()
    }
    for key in [*shapes, *given]:
        if key not in given:
            raise AdapterError(
                name,
                f"tensor {key} is missing in this process; pass the tensors of all processes as weights=",
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
        keys = {part: f"{PREFIX}{key}.{own_key}" for part, own_key in layer.peft_keys(layer, spec).items()}
        own = {part: state[whole] for part, whole in keys.items()}
        for part, tensor in layer.exported(name, own).items():
            found[keys[part]] = tensor.contiguous()
    return found


def _tied(model: nn.Module, name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of tied copies, which a folder holds under the name of each layer."""
    tied = {key: layer.specs[name] for key, layer in adapter_layers(model, name).items()}
    return {
        f"{PREFIX}{key}.weight": state[f"{PREFIX}{spec.tied_to}.weight"].clone()
        for key, spec in tied.items()
        if spec.tied_to and spec.kind == TRAINED_COPY
    }


def _changed_base(model: nn.Module, name: str, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns embeddings under PEFT's keys, which have `.base_layer` if the adapter sits on the embedding."""
    layers = adapter_layers(model, name)
    state = {}
    for key, tensor in embeddings.items():
        layer, _, parameter = key.rpartition(".")
        if layer in layers and layers[layer].specs[name].kind == TRAINED_COPY:
            continue  # the adapter's copy takes its place
        base = ".base_layer" if layer in layers else ""
        state[f"{PREFIX}{layer}{base}.{parameter}"] = tensor.to("cpu", copy=True).contiguous()
    return state


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
