"""Saves a converted model as PEFT folders, with the file that a Trainer resumes from.

Trainer reads a checkpoint of any model but a `PeftModel` from `model.safetensors`, by `load_state_dict` with
`strict=False`. That file holds the adapters under the model's own keys, and the dropout step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.adapter_weights import adapter_layers, adapter_parameters, saved_tensors
from ..routing.router import router_of
from ..warn_caller import warn_caller
from .peft_folder import resized_embeddings, write_folder
from .side_files import warn_of_unsaid

_FILE = "model.safetensors"
_STEP = "mlora_router.step"


def install(model: nn.Module) -> None:
    """Lets a freshly converted model load that `model.safetensors`."""
    model.register_load_state_dict_pre_hook(_read_step)
    model.register_load_state_dict_pre_hook(_end_waiting)
    model.register_load_state_dict_post_hook(_excuse_base)


def _end_waiting(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    """An adapter whose weights will all be loaded needs no initial values any more."""
    for name, info in router_of(model).adapters.items():
        own = adapter_parameters(model, name) if info.awaits_start else {}
        shapes = {key: getattr(state_dict.get(prefix + key), "shape", None) for key in own}
        if own and all(shapes[key] == parameter.shape for key, parameter in own.items()):
            info.awaits_start = False


def adapter_tensors(
    model: nn.Module, name: str, state_dict: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns an adapter's weights as contiguous copies, `{"<layer>.lora_A.weight": [r, d_in], ...}`.

    `state_dict` replaces the model's own; weights that it lacks are left out.
    """
    own = saved_tensors(model, name)
    source = own if state_dict is None else state_dict
    return {
        key: source[mine].detach().clone(memory_format=torch.contiguous_format)
        for mine, key in _peft_keys(model, name).items()
        if mine in source
    }


def _peft_keys(model: nn.Module, name: str) -> dict[str, str]:
    """Returns PEFT's keys, without its prefix, by the keys of the model's own state dict."""
    return {
        f"{key}.{layer.state_key(name, part)}": f"{key}.{own_key}"
        for key, layer in adapter_layers(model, name).items()
        for part, own_key in layer.peft_keys(layer, layer.specs[name]).items()
    }


def save(
    model: nn.Module,
    names: Sequence[str],
    directory: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor] | None,
) -> None:
    """Writes the adapters as PEFT folders, and the file that Trainer reads.

    Raises ValueError if weights are missing in `state_dict`, or the folder holds another model's weights.
    """
    folder = Path(directory)
    _refuse_other_model(folder)
    if len(names) > 1 and "default" not in names:
        _clear_root(folder)
    resumed = {_STEP: torch.tensor(router_of(model).step, device="cpu"), **_trained_base(model, state_dict)}
    embeddings = resized_embeddings(model, state_dict)
    resumed |= {key: tensor.clone() for key, tensor in embeddings.items()}
    for name in names:
        tensors = adapter_tensors(model, name, state_dict)
        inside = len(names) > 1 and name != "default"
        weights = {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}
        write_folder(model, name, folder / name if inside else folder, weights, embeddings)
        resumed |= {mine: tensors[key] for mine, key in _peft_keys(model, name).items() if key in tensors}
    _write(folder / _FILE, resumed)
    warn_of_unsaid(model)


def _trained_base(model: nn.Module, state_dict: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Returns base parameters that the user lets train, with a warning: PEFT's folders lack them."""
    source = model.state_dict() if state_dict is None else state_dict
    ours = _adapters_keys(model)
    trained = [key for key, p in model.named_parameters() if p.requires_grad and key not in ours]
    found = {key: source[key].detach().clone() for key in trained if key in source}
    if found:
        some = [*list(found)[:3], *(["..."] if len(found) > 3 else [])]
        warn_caller(
            f"{', '.join(some)}: trained parts of the base model are saved in {_FILE}: Trainer resumes from "
            "it, PEFT loads the adapters only"
        )
    return found


def _adapters_keys(model: nn.Module) -> set[str]:
    return {key for name in router_of(model).adapters for key in saved_tensors(model, name)}


def _clear_root(folder: Path) -> None:
    """Deletes an adapter that an earlier save left in the root: PEFT would load it in place of these.

    Raises ValueError if something else saved it.
    """
    if not (folder / "adapter_config.json").exists():
        return
    if not (folder / _FILE).exists():
        raise ValueError(
            f"save_directory: {folder} already holds a PEFT adapter, and PEFT would load it in place of "
            "these; choose another folder"
        )
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).unlink(missing_ok=True)


def _refuse_other_model(folder: Path) -> None:
    from safetensors import safe_open

    if (folder / _FILE).is_file():
        with safe_open(folder / _FILE, framework="pt") as file:
            if _STEP not in file.keys():  # noqa: SIM118  (a file, not a dict)
                raise ValueError(
                    f"save_directory: refusing to overwrite the model weights in {folder / _FILE}; choose "
                    "another folder, or save one adapter with mlora_ext.save_adapter"
                )


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save as serialised

    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        scratch = Path(folder) / path.name
        scratch.write_bytes(serialised(dict(tensors), metadata={"format": "pt"}))
        os.replace(scratch, path)


def _read_step(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Reads the dropout step, which is no tensor of the model, before a state dict is loaded."""
    step = state_dict.get(prefix + _STEP)
    if step is not None:
        router_of(model).step = int(step)


def _excuse_base(model: nn.Module, incompatible: Any) -> None:
    """Drops the step and missing base weights from the report on such a file: both are by design."""
    if _STEP in incompatible.unexpected_keys:
        incompatible.unexpected_keys.remove(_STEP)
        ours = _adapters_keys(model)
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key in ours]
