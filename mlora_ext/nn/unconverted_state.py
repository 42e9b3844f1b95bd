"""Finds module state that a conversion would lose, such as hooks, and moves or refuses it."""

from __future__ import annotations

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_RUN = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
"""Attributes in which a module keeps the hooks that run in its forward and backward."""


def check_layer(key: str, module: nn.Module) -> None:
    """Raises ValueError for a linear layer with anything that the converted layer would not have."""
    if hasattr(module, "_hf_hook"):
        raise ValueError(
            f"layer {key}: is offloaded by accelerate; load the model without device_map offloading"
        )
    check_untouched(f"layer {key}", module)
    parts = (*module._parameters, *module._buffers, *module._modules)
    others = [name for name in parts if name not in ("weight", "bias")]
    if others:
        raise ValueError(
            f"layer {key}: has {', '.join(others)} beside weight and bias, as after pruning, weight_norm or "
            "parametrizations; make the weight a plain parameter (remove_parametrizations, prune.remove, "
            "remove_weight_norm)"
        )
    _check_plain(key, module)


def _check_plain(key: str, module: nn.Module) -> None:
    for name, tensor in module.named_parameters(recurse=False):
        halves = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if is_traceable_wrapper_subclass(tensor) or not halves:
            kind = type(tensor.data).__name__
            raise ValueError(
                f"layer {key}: expected a plain floating-point {name}, got {kind} of {tensor.dtype}; "
                "quantized and sharded bases are not supported yet; load the original weights"
            )


def check_module(key: str, module: nn.Module) -> None:
    """Raises ValueError for a module of which copies are trained, if it has anything that they would not."""
    for part, inside in module.named_modules(prefix=key):
        if hasattr(inside, "_hf_hook"):
            raise ValueError(
                f"layer {part}: is offloaded by accelerate; load the model without device_map offloading"
            )
        check_untouched(f"layer {part}", inside)
        _check_plain(part, inside)


def check_untouched(what: str, module: nn.Module, moves: bool = False) -> None:
    """Raises ValueError if dropping a module would lose hooks, a replaced forward or a compiled call.

    `what` names the module in messages. `moves` allows the hooks that `move_hooks` moves elsewhere.
    """
    for field, hooks in vars(module).items():
        if field.endswith("_hooks") and hooks and not (moves and field in _RUN):
            raise ValueError(
                f"{what}: has {field.strip('_').replace('_', ' ')}, which conversion would discard; remove "
                "them, convert the model, and register them on the converted model"
            )
    own = vars(module).get("forward")
    # PEFT's update_forward_signature puts the class's own forward on the instance.
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        raise ValueError(
            f"{what}: its forward was replaced on the instance, and conversion would discard the "
            "replacement; delete the attribute before you convert the model"
        )
    if module._compiled_call_impl is not None:
        raise ValueError(f"{what}: is compiled, and conversion would undo it; compile the converted model")


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Makes one module's forward and backward hooks run with another; their handles still remove them."""
    for field in _RUN:
        target.__dict__[field] = source.__dict__[field]
