"""Reads single weights from a model's folder of safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from ..errors import NamedError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weights_in(folder: Path, prefix: str) -> Callable[[str], Tensor]:
    """Returns a function that reads a layer's weight; it raises ValueError if the folder lacks it.

    Args:
        folder: with one file or an index of several.
        prefix: of the base model inside a model with a head, such as `model`; the files may leave it out, or
            have it where the layer's name does not.

    Raises:
        ValueError: the folder has neither file, or one cannot be read.
    """
    files = _files(folder)

    def read(layer: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        plain = layer.removeprefix(f"{prefix}.")
        keys = [f"{name}.weight" for name in (layer, plain, f"{prefix}.{layer}")]
        key = next((key for key in keys if key in files), None)
        if key is None:
            raise ValueError(f"{folder} has no tensor {keys[0]}; give the original model's folder")
        try:
            with safe_open(folder / files[key], framework="pt") as file:
                tensor: Tensor = file.get_tensor(key)
                return tensor
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / files[key]} cannot be read: {error}") from error

    return read


def _files(folder: Path) -> dict[str, str]:
    """Returns the name of each tensor's file."""
    from safetensors import SafetensorError, safe_open

    try:
        if (folder / WHOLE).is_file():
            with safe_open(folder / WHOLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), WHOLE)
        if (folder / INDEX).is_file():
            found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise NamedError("folder", f"the weights in {folder} cannot be read: {error}") from error
    raise NamedError(
        "folder",
        f"{folder} has neither {WHOLE} nor {INDEX}; save the original model there with save_pretrained",
    )
