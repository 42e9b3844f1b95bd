"""Modules that share the input embedding's weight, and adapters that keep it shared (`ensure_weight_tying`).

Follows PEFT 0.21: of modules in `modules_to_save`, only those called `embed_tokens` or `lm_head` count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..adapters.kind import LayerSpec
from ..adapters.trained_parts import TRAINED_COPY
from ..errors import AdapterError
from ..layers.over_module import plain_module
from ..layers.plain_linear import is_plain_linear
from ..warn_caller import warn_caller

if TYPE_CHECKING:
    from peft import LoraConfig


def input_embedding(model: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    """Returns the name of the model's input embedding; empty if the model does not tell."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    try:
        own = getter() if callable(getter) else None
    except NotImplementedError:  # models with several, such as CLIP
        return ""
    return next((key for key, module in modules.items() if module is own), "")


def tied_to_embedding(model: nn.Module, embedding: str) -> list[str]:
    """Returns the names of the modules whose weight is tied to the input embedding, by PEFT's rules."""
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import _get_module_names_tied_with_embedding

    config: Any = BaseTuner.get_model_config(model)  # type: ignore[arg-type]
    if not embedding or not config.get("tie_word_embeddings", False):
        return []
    return [key for key in _get_module_names_tied_with_embedding(model) if key != embedding]


def tied_copies(
    model: nn.Module, name: str, config: LoraConfig, modules: Mapping[str, nn.Module], copies: Iterable[str]
) -> dict[str, LayerSpec]:
    """Returns specs of the embedding and of what is tied to it, if an adapter keeps its copies tied.

    The embedding's copy holds the weight, and the others read it.

    Args:
        modules: the base's modules by name.
        copies: the names of the modules in `modules_to_save`.

    Raises:
        ValueError: PEFT would not keep the copies tied.
    """
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    embedding = input_embedding(model, modules)
    tied = tied_to_embedding(model, embedding)
    wanted = [key for key in copies if any(f"{one}.".startswith(f"{key}.") for one in (embedding, *tied))]
    if not (config.ensure_weight_tying and tied and wanted):
        return {}
    for key in tied:
        module = plain_module(modules[key])
        if not is_plain_linear(module):
            raise AdapterError(
                name,
                f"ensure_weight_tying: {key} has the weight of {embedding} and is of class "
                f"{type(module).__name__}; only linear layers can share the embedding's copy (PEFT's forward "
                "fails); leave ensure_weight_tying out",
            )
    if not any(one.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for one in config.modules_to_save or ()):
        raise AdapterError(
            name,
            f"ensure_weight_tying: PEFT ties only {' and '.join(EMBEDDING_LAYER_NAMES)}, "
            f"and modules_to_save names {wanted[0]}; name {tied[0]}, or leave ensure_weight_tying out",
        )
    for key in tied:
        if getattr(modules[key], "bias", None) is not None:
            raise AdapterError(
                name,
                f"ensure_weight_tying: {key} has a bias, which PEFT leaves out of a tied "
                "copy; leave ensure_weight_tying out",
            )
    own = LayerSpec(0, 1.0, 0.0, TRAINED_COPY)
    return {embedding: own} | dict.fromkeys(tied, replace(own, tied_to=embedding))


def warn_of_nothing_tied(model: nn.Module, name: str, config: LoraConfig) -> None:
    """Warns, as PEFT does, of `ensure_weight_tying` where no module is tied to the input embedding."""
    if not config.ensure_weight_tying:
        return
    if not tied_to_embedding(model, input_embedding(model, dict(model.named_modules()))):
        warn_caller(
            f"adapter {name!r}: ensure_weight_tying changes nothing: no module of this model is tied to its "
            "input embedding"
        )


def refuse_tied_targets(
    model: nn.Module, name: str, config: LoraConfig, modules: Mapping[str, nn.Module], layers: Iterable[str]
) -> None:
    """Raises ValueError if low-rank parts of the embedding and of its tied head would have to be the same.

    Args:
        modules: the base's modules by name.
        layers: the names of those with low-rank parts.
    """
    if not config.ensure_weight_tying:
        return
    embedding = input_embedding(model, modules)
    tied = tied_to_embedding(model, embedding)
    found = [key for key in layers if key in (embedding, *tied)]
    if tied and found:
        raise AdapterError(
            name,
            f"ensure_weight_tying is not supported for low-rank parts ({found[0]} is in "
            "target_modules): PEFT gives the shared matrices two optimizer states, which both change them; "
            "leave it out, or use modules_to_save or trainable_token_indices",
        )
