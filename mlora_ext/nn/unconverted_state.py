"""What modules carry beside their weights and a conversion would lose: moved over, or refused by name."""

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
"""Where a module keeps the hooks that run with it."""


def check_layer(key: str, module: nn.Module) -> None:
    """Refuse a linear layer with anything that the layer in its place would not have.

    Raises:
        ValueError: naming the layer, what it has, and what to do.
    """
    if hasattr(module, "_hf_hook"):
        raise ValueError(
            f"layer {key}: is offloaded by accelerate; load the model without device_map offloading"
        )
    check_untouched(f"layer {key}", module)
    parts = (*module._parameters, *module._buffers, *module._modules)
    others = [name for name in parts if name not in ("weight", "bias")]
    if others:
        raise ValueError(
            f"layer {key}: has {', '.join(others)} beside weight and bias, as pruning, weight_norm and "
            "parametrizations make; make the weight a plain parameter first (remove_parametrizations, "
            "prune.remove, remove_weight_norm)"
        )
    for name, tensor in module.named_parameters(recurse=False):
        halves = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if is_traceable_wrapper_subclass(tensor) or not halves:
            kind = type(tensor.data).__name__
            raise ValueError(
                f"layer {key}: expected a plain floating-point {name}, got {kind} of {tensor.dtype}; "
                "quantized and sharded bases are not supported yet, load the model as it was before"
            )


def check_untouched(what: str, module: nn.Module, moves: bool = False) -> None:
    """Refuse a module with hooks, another forward or a compiled call, which end with it.

    Args:
        what: the module is, for messages.
        module: that a conversion drops.
        moves: whether `move_hooks` takes the hooks that run with it elsewhere.

    Raises:
        ValueError: naming the module, what it has, and what to do.
    """
    for field, hooks in vars(module).items():
        if field.endswith("_hooks") and hooks and not (moves and field in _RUN):
            raise ValueError(
                f"{what}: has {field.strip('_').replace('_', ' ')}, which conversion would drop: remove them "
                "before it, and register them on the converted model after it"
            )
    own = vars(module).get("forward")
    # PEFT's update_forward_signature puts the class's own on the instance.
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:
        raise ValueError(
            f"{what}: its forward was replaced on the instance, which conversion would drop: delete that "
            "attribute before it"
        )
    if module._compiled_call_impl is not None:
        raise ValueError(f"{what}: is compiled, which conversion would drop: compile the converted model")


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let the hooks of one module run with another; their handles still remove them."""
    for field in _RUN:
        target.__dict__[field] = source.__dict__[field]
