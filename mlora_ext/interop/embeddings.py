"""Embeddings that the user has resized: they are saved with adapters, as PEFT saves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..warn_caller import warn_caller


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
