"""Finds module state that a conversion would lose, such as hooks, and moves or refuses it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..frozen.quantized.families import family_of, fault_of, is_gptqmodel, is_library_layer
from ..layers.adapter_layer import AdapterLayer

MOVED = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
"""Attributes with the hooks that run in a module's forward and backward; `move_hooks` moves them."""
_OF_BITSANDBYTES = frozenset({"_load_state_dict_pre_hooks"})
"""Hooks that bitsandbytes puts on each of its layers."""


def check_layer(key: str, module: nn.Module, own_parts: bool = False) -> None:
    """Raises ValueError for a layer with anything that the converted layer would not have.

    `own_parts`: it may have other parts than weight and bias, since the converted layer keeps it.
    """
    if hasattr(module, "_hf_hook"):
        raise ValueError(
            f"layer {key}: is offloaded by accelerate; load the model without device_map offloading"
        )
    check_untouched(f"layer {key}", module, _OF_BITSANDBYTES if is_library_layer(module) else ())
    parts = (*module._parameters, *module._buffers, *module._modules)
    others = [name for name in parts if name not in ("weight", "bias")]
    if others and not own_parts and not is_gptqmodel(module):
        raise ValueError(
            f"layer {key}: has {', '.join(others)} beside weight and bias, as after pruning, weight_norm or "
            "parametrizations; make the weight a plain parameter (remove_parametrizations, prune.remove, "
            "remove_weight_norm)"
        )
    if family_of(module) is not None:
        fault = fault_of(module)
        if fault:
            raise ValueError(f"layer {key}: {fault}")
        return
    if is_library_layer(module):  # on the meta device: another stage's
        return
    _check_plain(key, module)


def check_module(key: str, module: nn.Module, allowed: Collection[str] = ()) -> None:
    """Raises ValueError for a module of which copies are trained, if it has anything that they would not.

    `allowed` names attributes whose hooks may be there.
    """
    converted = "."  # its parts are checked when it is converted
    for part, inside in module.named_modules(prefix=key):
        if isinstance(inside, AdapterLayer):
            converted = f"{part}."
        if isinstance(inside, AdapterLayer) or part.startswith(converted):
            continue
        if hasattr(inside, "_hf_hook"):
            raise ValueError(
                f"layer {part}: is offloaded by accelerate; load the model without device_map offloading"
            )
        check_untouched(f"layer {part}", inside, allowed)
        _check_plain(part, inside)


def _check_plain(key: str, module: nn.Module) -> None:
    for name, tensor in module.named_parameters(recurse=False):
        halves = tensor.is_floating_point() and tensor.dtype.itemsize > 1
        if is_traceable_wrapper_subclass(tensor) or not halves:
            kind = type(tensor.data).__name__
            raise ValueError(
                f"layer {key}: expected a plain floating-point {name}, got {kind} of {tensor.dtype}; "
                "quantized bases, except those of bitsandbytes, torchao and gptqmodel, and sharded ones are "
                "not supported; load the original weights"
            )


def check_untouched(what: str, module: nn.Module, allowed: Collection[str] = ()) -> None:
    """Raises ValueError if dropping a module would lose hooks, a replaced forward or a compiled call.

    `what` names the module in messages. `allowed` names attributes whose hooks may be there.
    """
    for field, hooks in vars(module).items():
        if field.endswith("_hooks") and hooks and field not in allowed:
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
    for field in MOVED:
        target.__dict__[field] = source.__dict__[field]
