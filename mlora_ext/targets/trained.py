"""Finds the modules that an adapter trains copies or rows of, by PEFT's rules."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..adapters.kind import LayerSpec
from ..adapters.trained_parts import (
    TRAINED_COPY,
    TRAINED_ROWS,
    head_kind,
    task_heads,
    task_of,
)
from ..errors import AdapterError
from ..layers.copies import why_not_copied
from ..layers.layer_kinds import layer_kind
from ..layers.over_module import plain_module
from ..layers.plain_linear import is_plain_linear
from ..layers.row_head import warn_of_dropped_biases
from ..layers.task_heads import TaskHeads
from ..layers.trained_rows import has_plain_rows
from .tied_weights import input_embedding, tied_copies, tied_to_embedding, warn_of_nothing_tied

if TYPE_CHECKING:
    from peft import LoraConfig


def trained_layers(
    model: nn.Module, name: str, config: LoraConfig, modules: Mapping[str, nn.Module]
) -> dict[str, LayerSpec]:
    """Returns the adapter's spec for each module of `modules_to_save` and `trainable_token_indices`.

    Args:
        config: with the heads of its task, see `with_task_heads`.
        modules: the base's modules by name.

    Raises:
        ValueError: a name matches nothing, or a module cannot be trained.
    """
    copies = _copies(name, config, modules)
    copies |= tied_copies(model, name, config, modules, copies)
    rows = _rows(model, name, config, modules)
    for key in rows:
        if key in copies:
            raise AdapterError(
                name, f"{key} is in modules_to_save and in trainable_token_indices; remove one of them"
            )
    return copies | rows


def warn_of_trained_parts(model: nn.Module, adapters: Mapping[str, LoraConfig]) -> None:
    """Warns of what new adapters of a converted model train otherwise than PEFT, or in vain."""
    for name, config in adapters.items():
        warn_of_dropped_biases(model, name)
        warn_of_nothing_tied(model, name, config)


def _copies(name: str, config: LoraConfig, modules: Mapping[str, nn.Module]) -> dict[str, LayerSpec]:
    wanted = list(config.modules_to_save or ())
    found: dict[str, LayerSpec] = {}
    named = {key: module for key, module in modules.items() if key.endswith(tuple(wanted))}
    trained = [key for key, module in named.items() if next(module.parameters(), None) is not None]
    ends = tuple(one for one in wanted if any(key.endswith(one) for key in trained))
    for key, module in named.items():
        if any(key.startswith(f"{other}.") for other in found):
            continue
        if isinstance(module, TaskHeads):
            found[key] = _head(name, config)
            continue
        if key not in trained and key.endswith(ends):
            continue  # such as an Identity in the place of a norm
        reason = why_not_copied(module)
        if reason is not None:
            raise AdapterError(
                name,
                f"modules_to_save: {key} {reason}; only modules that act on single rows, "
                "such as heads and norms, or have convolutions or batch normalisation, can be trained per "
                "adapter",
            )
        found[key] = LayerSpec(0, 1.0, 0.0, TRAINED_COPY)
    _refuse_unmatched(name, config, wanted, list(found), modules)
    return found


def _head(name: str, config: LoraConfig) -> LayerSpec:
    """Returns the spec of a head that the base lacks; a classifier's config has `num_labels`, too."""
    labels = 2 if task_of(config) == "QUESTION_ANS" else getattr(config, "num_labels", None)
    if labels is None:
        raise AdapterError(name, f"task_type={task_of(config)!r} needs num_labels")
    return LayerSpec(int(labels), 1.0, 0.0, head_kind(config))


def _refuse_unmatched(
    name: str,
    config: LoraConfig,
    wanted: list[str],
    found: list[str],
    modules: Mapping[str, nn.Module],
) -> None:
    heads = task_heads(config)
    for one in wanted:
        if one in heads or any(key.endswith(one) for key in found):
            continue
        short = list(dict.fromkeys(key.rpartition(".")[2] for key in modules))
        near = difflib.get_close_matches(one, short, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AdapterError(name, f"modules_to_save: {one!r} matches nothing in the model{hint}")
    task = task_of(config)
    if heads and not any(key.endswith(heads) for key in found):
        raise AdapterError(
            name,
            f"task_type={task!r} trains a head named {' or '.join(heads)}, and the model "
            "has none; load it with its AutoModelFor... class, or leave task_type out",
        )


def _rows(
    model: nn.Module, name: str, config: LoraConfig, modules: Mapping[str, nn.Module]
) -> dict[str, LayerSpec]:
    asked: Any = config.trainable_token_indices
    if asked is None:
        return {}
    embedding = input_embedding(model, modules)
    if not isinstance(asked, dict):
        asked = {embedding or "embed_tokens": asked}
    tied = tied_to_embedding(model, embedding)
    targets: dict[str, list[int]] = {}
    for target, tokens in asked.items():
        keys = [key for key in modules if key.endswith(target)]
        if not keys:
            raise AdapterError(name, f"trainable_token_indices: {target!r} matches nothing in the model")
        targets |= {key: list(tokens) for key in keys}
    found = {
        key: LayerSpec(len(tokens), 1.0, 0.0, TRAINED_ROWS, tokens=tuple(tokens))
        for key, tokens in targets.items()
    }
    own = targets.get(embedding)
    if own is not None and all(targets.get(key, own) == own for key in tied):
        rows = LayerSpec(len(own), 1.0, 0.0, TRAINED_ROWS, tokens=tuple(own), tied_to=embedding)
        found |= dict.fromkeys(tied, rows)
    elif config.ensure_weight_tying and any(key in targets for key in tied):
        raise AdapterError(
            name,
            f"ensure_weight_tying: trainable_token_indices must name the same tokens for "
            f"{embedding} and {', '.join(tied)}",
        )
    for key, spec in found.items():
        _check_rows(name, key, modules[key], spec)
    return found


def _check_rows(name: str, key: str, module: nn.Module, spec: LayerSpec) -> None:
    plain = plain_module(module)
    known = isinstance(plain, nn.Embedding) or is_plain_linear(plain)
    if known and not has_plain_rows(module):
        raise AdapterError(
            name,
            f"trainable_token_indices: {key} is a {type(plain).__name__} with quantised or "
            "sharded weights, whose rows cannot be trained; leave it out, or do not quantise it",
        )
    try:
        layer_kind(module, spec.kind)
    except ValueError as error:
        raise AdapterError(
            name,
            f"trainable_token_indices: {key} is a {type(plain).__name__}; only plain "
            "embeddings and linear layers have rows that can be trained",
        ) from error
    rows = plain.weight.shape[0]  # type: ignore[union-attr, index]
    for token in spec.tokens:
        if not 0 <= token < rows:
            raise AdapterError(
                name, f"trainable_token_indices: token {token} is outside of {key}, which has {rows} rows"
            )
