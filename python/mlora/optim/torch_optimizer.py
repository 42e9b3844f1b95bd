"""Optimizers of `torch.optim` by their names there: `optim: torch.optim.NAdam`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mlora.optim.optimizer import Optimizer, Shapes, elements


class NamedTorchOptimizer(Optimizer):
    """Runs torch's own step.

    `adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay` are passed where torch's class takes them.
    Its other settings keep their defaults.

    State: the tensors that torch keeps for each Parameter, by name in alphabetical order.

    Attributes:
        kind: the class of torch.
    """

    kind: Any

    @classmethod
    def state_bytes(cls, shapes: Shapes) -> int:  # type: ignore[override]
        return sum(cls._bytes(tuple(shape)) for shape in shapes)

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        """Returns the bytes of three fp32 numbers for each weight: the most that any of them takes.

        That is Adadelta with weight decay on a GPU, where torch works on all weights at once.
        """
        return 3 * 4 * elements(shapes)

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        torch._foreach_mul_(list(gradients), scale)
        config, parameters = self.config, [self.parameters[i] for i in index]
        settings = {
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_epsilon,
            "weight_decay": self.weight_decay(index),
        }
        own = {name: value for name, value in settings.items() if name in self._settings()}
        library = self.kind(parameters, lr=learning_rate, **own)
        for i, parameter in zip(index, parameters, strict=True):
            if self.state[i]:
                library.state[parameter] = dict(zip(self._state_names(), self.state[i], strict=True))
        library.step()
        for i, parameter in zip(index, parameters, strict=True):
            self.state[i] = [library.state[parameter][name] for name in self._state_names()]

    def load_state(self, state: Sequence[Sequence[Tensor]]) -> None:
        """Takes over a `state`; a Parameter that has had no gradient yet has none.

        Raises:
            ValueError: a shape or a dtype differs from what torch makes.
        """
        for parameter, own in zip(self.parameters, state, strict=True):
            made = self._made(tuple(parameter.shape)).values()
            if own and [(t.shape, t.dtype) for t in own] != [(t.shape, t.dtype) for t in made]:
                raise ValueError("state: the optimizer's moments do not fit the adapter's Parameters")
        self.state = [
            [tensor.to(parameter.device if tensor.dim() else "cpu", copy=True) for tensor in own]
            for parameter, own in zip(self.parameters, state, strict=True)
        ]

    @classmethod
    @cache
    def _bytes(cls, shape: tuple[int, ...]) -> int:
        return sum(tensor.nbytes for tensor in cls._made(shape).values())

    @classmethod
    @cache
    def _settings(cls) -> set[str]:
        return set(inspect.signature(cls.kind).parameters)

    @classmethod
    @cache
    def _state_names(cls) -> list[str]:
        return list(cls._made((1,)))

    @classmethod
    def _made(cls, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns what torch keeps for a Parameter of this shape, by name: from a step on zeros."""
        parameter = torch.zeros(shape, device="cpu", requires_grad=True)
        parameter.grad = torch.zeros_like(parameter)
        library = cls.kind([parameter])
        library.step()
        return dict(sorted(library.state[parameter].items()))


@cache
def __getattr__(name: str) -> Any:
    kind = getattr(torch.optim, name, None)
    if not isinstance(kind, type):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (NamedTorchOptimizer,), {"kind": kind, "__doc__": f"`torch.optim.{name}`."})
