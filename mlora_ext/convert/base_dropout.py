"""Sets the base model's dropouts to 0."""

from __future__ import annotations

from torch import nn

from ..warn_caller import warn_caller

_RANDOM = ("dropout", "pdrop", "drop_path", "drop_prob", "layerdrop", "jitter_noise")


def zero_base_dropout(model: nn.Module) -> int:
    """Sets every base dropout to 0: one mask for a whole batch makes its adapters depend on each other.

    Returns how many were not 0.
    """
    stopped = 0
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            module.p = 0.0
            stopped += 1
        stopped += _zero_dropout_fields(module)
    return stopped + _zero_dropout_fields(getattr(model, "config", None))


def warn_of_stopped_dropouts(stopped: int) -> None:
    """Warns of dropouts that were set to 0, if there are any."""
    if stopped:
        warn_caller(
            f"{stopped} dropouts of the base model were set to 0; use lora_dropout to regularise an adapter"
        )


def _zero_dropout_fields(owner: object) -> int:
    """Sets floats such as `attention_dropout`, which attention functions read, to 0; returns how many."""
    found = [
        key
        for key, value in getattr(owner, "__dict__", {}).items()
        if any(word in key for word in _RANDOM)
        and not key.startswith("summary_")
        and type(value) is float
        and 0 < value < 1
    ]
    for key in found:
        setattr(owner, key, 0.0)
    return len(found)
