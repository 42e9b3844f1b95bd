"""Takes the place of a `torch.optim.AdamW`, so that a training loop stays as it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mlora.offload.out_of_core import OutOfCoreAdamW
from mlora.offload.updates import AdamWStep

_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


class TorchOptimizer:
    """Does the work of a `torch.optim.AdamW` out of core; see `mlora.offload.offloaded`.

    Args:
        given: the optimizer; its `step` is replaced until `close`.
        parameters: its Parameters, by name.
        adamw: does the work.
        active: whether a Parameter is updated as soon as its gradient is there.

    Attributes:
        grad_norm: norm of the latest step's gradients.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer,
        parameters: dict[str, nn.Parameter],
        adamw: OutOfCoreAdamW,
        *,
        active: bool,
    ) -> None:
        self.grad_norm = 0.0
        self._given, self._parameters, self._adamw, self._active = given, parameters, adamw, active
        self._groups = {id(p): group for group in given.param_groups for p in group["params"]}
        self._came: set[str] = set()
        self._accumulates = False
        self._undo = ExitStack()
        self._undo.callback(adamw.close)
        if active:
            for name, parameter in parameters.items():
                if not parameter.requires_grad:
                    continue
                hook = functools.partial(self._gradient_came, name)
                self._undo.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        taken: Any = given

        @functools.wraps(taken.step)  # with the marks of learning-rate schedules
        def step(_: object, closure: None = None) -> None:
            self.step(closure)

        taken.step = MethodType(step, given)
        for register, what in (
            (given.register_state_dict_pre_hook, "state_dict: use save"),
            (given.register_load_state_dict_pre_hook, "load_state_dict: use load"),
        ):
            self._undo.callback(register(functools.partial(_refuse, what)).remove)
        self._undo.callback(setattr, taken, "step", _gone)

    def close(self) -> None:
        """Gives the optimizer back, without states: its `step` says so."""
        self._undo.close()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keeps gradients inside `with`."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Waits until all Parameters with a gradient are updated, once each.

        Raises:
            OSError: states or weights could not be read or written.
            FloatingPointError: a gradient is not finite. Without active updates, nothing has changed then.
            ValueError: there is a closure, or Parameters came to the optimizer after `with` began.
        """
        if closure is not None:
            raise ValueError("step: a closure is not supported")
        if sum(len(group["params"]) for group in self._given.param_groups) != len(self._parameters):
            raise ValueError("step: the optimizer has other Parameters than when `with` began")
        self._submit_all()  # if updates are active: what accumulated and had no part in the last pass
        self.grad_norm = math.sqrt(self._adamw.finish())
        self._came.clear()
        self._given._opt_called = True  # type: ignore[attr-defined]

    def save(self, folder: str | Path) -> None:
        """Writes weights, moments, counts of steps, and the parameter groups' settings to a folder.

        The folder holds one whole version at any time; see `OutOfCoreAdamW.save`.
        """
        self._adamw.save(folder, [_settings(group) for group in self._given.param_groups])

    def load(self, folder: str | Path) -> None:
        """Takes over what `save` wrote: the model's weights, and the groups' settings, such as `lr`.

        Raises:
            OSError: a file is missing, or cannot be read.
            ValueError: it is of another model, or was damaged.
        """
        for group, settings in zip(self._given.param_groups, self._adamw.load(folder), strict=False):
            group.update({**settings, "betas": tuple(settings["betas"])})

    def _submit_all(self) -> None:
        """Submits the gradients that are there, in the order of a backward pass."""
        waiting = [(name, p.grad) for name, p in self._parameters.items() if p.grad is not None]
        for name, gradient in [] if self._active else waiting:
            if not torch.isfinite(torch.linalg.vector_norm(gradient)):
                raise FloatingPointError(f"{name}: the gradient is not finite; nothing was updated")
        for name, _ in reversed(waiting):
            self._submit(name)

    def _gradient_came(self, name: str, _: Tensor) -> None:
        if not self._accumulates:
            if name in self._came:
                raise RuntimeError(
                    f"{name}: a second gradient came before optimizer.step(); to accumulate gradients, run "
                    "all backward passes but the last inside accumulate()"
                )
            self._came.add(name)
            self._submit(name)

    def _submit(self, name: str) -> None:
        group = self._groups[id(self._parameters[name])]
        step = AdamWStep(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self._adamw.counts[name] + 1,
        )
        self._adamw.submit(name, step)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what JSON can hold of a parameter group: learning rates, betas, eps, weight decay."""
    found = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, Tensor) else value
        if key != "params" and isinstance(plain, (bool, int, float, tuple)):
            found[key] = plain
    return found


def _gone(*_: object) -> None:
    raise RuntimeError("optimizer.step: its states went with `mlora.offload.offloaded`; make a new optimizer")


def _refuse(what: str, *_: object) -> None:
    raise RuntimeError(
        f"{what}() of the `optimizer` of the object that `with mlora.offload.offloaded(...) as ...` gives: "
        "this optimizer's states are there"
    )


def parameters_of(model: nn.Module, given: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Returns an optimizer's Parameters by name, in the model's order.

    Raises:
        ValueError: it is no plain, new AdamW, or has Parameters that the model does not have.
    """
    if type(given) is not torch.optim.AdamW:
        raise ValueError(f"optimizer: expected a torch.optim.AdamW, got {type(given).__name__}")
    if given.state or vars(given).get("step") is _gone:
        raise ValueError("optimizer: expected a new one, but it has made steps")
    for group in given.param_groups:
        asked = [key for key in _REFUSED if group.get(key)]
        if asked:
            raise ValueError(f"optimizer: {asked[0]} is not supported")
    owned = {id(p) for group in given.param_groups for p in group["params"]}
    found = {name: p for name, p in model.named_parameters() if id(p) in owned}
    if len(found) != len(owned):
        raise ValueError(f"optimizer: {len(owned) - len(found)} of its Parameters are not in the model")
    return found
