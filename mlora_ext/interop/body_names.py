"""Names of a model's body in PEFT's files, where the class with an adapter's head calls it otherwise.

`LlamaForQuestionAnswering` calls `transformer` what `LlamaForCausalLM` calls `model`. PEFT loads a folder
over the class with the head, so the folder has its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..layers.task_heads import TaskHeads

if TYPE_CHECKING:
    from peft import LoraConfig


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
