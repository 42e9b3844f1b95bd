"""Runs forward passes that leave no trace in a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_APART = {"_parameters", "_buffers", "_modules"}


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Turns gradients and compilation off; afterwards restores the model's state and the random numbers.

    State: all modules' buffers and hooks, and number, string, tensor, list, dict and set attributes.
    """
    import numpy as np

    before = [_State(part) for part in module.modules()]
    devices = {p.device.index for p in module.parameters() if p.device.type == "cuda"}
    others = random.getstate(), np.random.get_state()  # SpecAugment draws from NumPy
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        random.setstate(others[0])
        np.random.set_state(others[1])
        for state in before:
            state.put_back()


class _State:
    """What one module holds besides its parameters and submodules."""

    def __init__(self, part: nn.Module) -> None:
        attributes = {name: value for name, value in part.__dict__.items() if name not in _APART}
        self._names = [(part.__dict__, set(part.__dict__)), (part._buffers, set(part._buffers))]
        self._values: list[tuple[dict[str, Any], str, Any, Any]] = [
            (names, name, value, _contents(value))
            for names, values in ((part.__dict__, attributes), (part._buffers, part._buffers))
            for name, value in values.items()
            if isinstance(value, bool | int | float | str | None | Tensor | list | dict | set)
        ]

    def put_back(self) -> None:
        """Restores the values and removes what was added."""
        for names, before in self._names:
            for name in set(names) - before:
                del names[name]
        for names, name, value, contents in self._values:
            names[name] = value
            _put_back(value, contents)


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, list | dict | set) else None


def _put_back(value: Any, contents: Any) -> None:
    if isinstance(value, list):
        value[:] = contents
    elif isinstance(value, dict | set):
        value.clear()
        value.update(contents)
    elif isinstance(value, Tensor) and _may_have_changed(value) and not torch.equal(value, contents):
        # Written only if needed: a graph in flight may hold the tensor, and autograd notices each write.
        with torch.no_grad():
            value.copy_(contents)


def _may_have_changed(tensor: Tensor) -> bool:
    """Whether a pass can have written to the tensor: not if it is expanded, inference-only or meta."""
    shared = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    fixed = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return not shared and not fixed and not tensor.is_meta
