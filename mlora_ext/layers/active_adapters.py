"""Chooses and disables a converted model's adapters, and counts its trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..routing.router import Router, router_of
from .adapter_weights import adapter_parameters
from .linear import MultiLoRALinear


def refuse_bypassed_head(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if TRL's fused head, which reads the head's weight itself, would skip an adapter."""
    head = model.get_output_embeddings() if arguments.get("fused_lm_head") else None  # type: ignore[operator]
    if isinstance(head, MultiLoRALinear) and head.specs:
        raise ValueError(
            f"layer {head.name}: TRL's fused_lm_head reads the layer's weight and skips its adapters "
            f"({', '.join(head.specs)}); remove this layer from their target_modules"
        )


def one_adapter(model: nn.Module, name: str | None) -> str:
    """Returns the adapter of that name; for None the one that `set_adapter` named, or the only one.

    Raises ValueError if the model has no such adapter, or has several and none is named.
    """
    if name is not None and not isinstance(name, str):
        raise ValueError(f"adapter_name: expected the name of one adapter, got {name!r}")
    router = router_of(model)
    chosen = name or router.default
    if chosen is None and len(router.adapters) != 1:
        known = ", ".join(router.adapters) or "none"
        raise ValueError(f"adapter_name: expected one of the model's adapters ({known}), got {name!r}")
    chosen = chosen or next(iter(router.adapters))
    router.check_names("adapter_name", [chosen])
    return chosen


@contextmanager
def disable_adapter(model: nn.Module) -> Iterator[None]:
    """Disables all adapters for forward calls inside the context: the base model alone computes.

    Forward calls may still give `adapter_names`. They are checked, but change nothing.

    Args:
        model: converted by `convert_model`.

    Raises:
        ValueError: if a route is active: it was built with its adapters.

    Example:
        >>> with disable_adapter(model):
        ...     reference = model(input_ids=ids, adapter_names=names).logits
    """
    router = router_of(model)
    before = router.disabled
    disable(router)
    try:
        yield
    finally:
        router.disabled = before


def disable(router: Router) -> None:
    """Disables all adapters; raises ValueError if a route is active."""
    if router.active is not None:
        raise ValueError("a route is active: disable the adapters before you enter mlora_ext.route(...)")
    router.disabled = True


def print_trainable_parameters(model: nn.Module) -> None:
    """Prints how many of all parameters are trainable, as `PeftModel` does.

    With several adapters it also prints a line for each.

    Args:
        model: converted by `convert_model`.
    """
    groups = {"trainable params": list(model.parameters())}
    names = list(router_of(model).adapters)
    for name in names if len(names) > 1 else ():
        groups[f"adapter {name}"] = list(adapter_parameters(model, name).values())
    whole = sum(parameter.numel() for parameter in model.parameters())
    for title, parameters in groups.items():
        count = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        print(f"{title}: {count:,d} || all params: {whole:,d} || trainable%: {100 * count / whole:.4f}")
