"""The interface of an optimizer. To add one, write one class: see `Optimizer`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from mlora.optim.groups import groups_of
from mlora.optim.optim_config import OptimConfig
from mlora.optim.step_rule import Update
from mlora_ext.library import LOADED

Shapes = Sequence[Sequence[int]]


class OptimizerError(RuntimeError):
    """An adapter's optimizer failed in a step. Only that adapter's weights may have changed.

    Args:
        message: why.
        name: of the adapter; the error is then printed as ``adapter 'name': message``.
    """

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message, name)
        self.message, self.name = message, name

    def __str__(self) -> str:
        return self.message if self.name is None else f"adapter {self.name!r}: {self.message}"


class Optimizer(ABC):
    """One adapter's gradients on one stage, which are sums over tokens, and what steps its Parameters.

    A subclass has `step`, `state_bytes` and, if there is a state, `begin`. The learning rate and a factor on
    the gradients (clipping, tokens and loss scale) are decided once for all stages and passed to `step`.
    `step` is called once for all Parameters that share a learning rate and a weight decay.
    Register a class with `mlora.optim.registry.register_optimizer`.

    Args:
        parameters: the adapter's Parameters on this stage by name, fp32. Names have `default` in place of the
            adapter's name.
        config: the adapter's settings.

    Attributes:
        parameters: the Parameters, in order.
        steps: steps made.
        state: for each Parameter, the tensors that last between steps, such as its moments; empty lists
            before the first step.
        groups: indices of the Parameters that share a learning rate and a weight decay.
        scalings: of each Parameter, the scaling of its LoRA layer (`alpha / r`); the engine sets it.
        keys: of each Parameter, its name in `state_dict`; the engine sets it, else the names are used.
        compiled: whether our compiled operators serve all Parameters and their held gradients.

    Example:
        >>> class Lion(Optimizer):
        ...     def step(self, index, gradients, learning_rate, scale, steps): ...
        ...     @staticmethod
        ...     def state_bytes(shapes): ...
        >>> register_optimizer("lion", Lion)
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        self.parameters: list[Tensor] = list(parameters.values())
        self.config = config
        self.state: list[list[Tensor]] = [[] for _ in parameters]
        self.steps = 0
        self.scalings: Sequence[float] = [1.0] * len(parameters)
        self.compiled = False
        self._names = list(parameters)
        self.keys: Sequence[str] = self._names
        self.spare_layer_norms(())
        for name, parameter in parameters.items():
            if not self.trains(name):
                parameter.requires_grad_(False)
        self._cleared: list[int] = []  # versions of held gradients when they were zeroed; empty: none is held
        self._written: Sequence[set[str]] = ()
        self._adapter = ""

    def begin(self) -> None:  # noqa: B027 - some have no state
        """Makes `state` before a step, if it is not there yet."""

    @abstractmethod
    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> bool | None:
        """Makes a step on some of the Parameters, in place. `weight_decay(index)` is their weight decay.

        Args:
            index: indices of the Parameters that have a gradient.
            gradients: their gradients, as sums over tokens; they may be overwritten.
            learning_rate: the learning rate of this step.
            scale: factor on the gradients.
            steps: number of steps made before.

        Returns:
            Whether it left zeros in the gradients; if not, the caller clears them.
        """

    @staticmethod
    @abstractmethod
    def state_bytes(shapes: Shapes) -> int:
        """Returns the bytes of `state` for Parameters of these shapes, after the first step."""

    @staticmethod
    def step_bytes(shapes: Shapes) -> int:
        """Returns the bytes that a step takes temporarily, for Parameters of these shapes. Default: 0."""
        return 0

    @staticmethod
    def trains(name: str) -> bool:
        """Returns whether a Parameter gets gradients and steps. Default: all do.

        Args:
            name: of the Parameter, or the part of it that is the same in all layers, such as `lora_A`.
        """
        return True

    @classmethod  # noqa: B027 - most serve every device
    def check(cls, name: str, device: torch.device) -> None:
        """Refuses a device that the optimizer does not serve. Default: it serves all.

        Args:
            name: the name under which the optimizer is registered.
            device: where the Parameters are.

        Raises:
            ValueError: the device is not served, or a package is missing.
        """

    def spare_layer_norms(self, index: Collection[int]) -> None:
        """Takes Parameters of `nn.LayerNorm` out of weight decay, whatever their names.

        Args:
            index: their indices.
        """
        named = dict(zip(self._names, self.parameters, strict=True))
        self.groups = groups_of(named, self.config, index)
        self._decays = {i: group.weight_decay for group, own in self.groups.items() for i in own}

    def weight_decay(self, index: Sequence[int]) -> float:
        """Returns the weight decay of Parameters of one group; as in Trainer, biases and norms have none.

        Args:
            index: indices of the Parameters, as `step` gets them.
        """
        return self._decays[index[0]]

    def gradients(self) -> dict[int, Tensor]:
        """Returns the gradients that backward has added to, by the index of their Parameter."""
        cleared, written, adapter = self._cleared, self._written, self._adapter
        return {
            i: gradient
            for i, parameter in enumerate(self.parameters)
            if (gradient := parameter.grad) is not None
            # a held gradient that nothing was added to since it was zeroed counts as none
            and not (cleared and gradient._version == cleared[i] and adapter not in written[i])
        }

    def squares(self) -> Tensor:
        """Returns the sum of the squares of the gradients: `[]` fp64, on their device."""
        gradients = list(self.gradients().values())
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        if self.compiled:
            found = torch.ops.mlora_ext.squares(gradients, 0)
            return torch.full((), found, dtype=torch.float64, device="cpu")
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))).double().square()

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Makes an update, and drops the gradients."""
        found, cleared = self.gradients(), False
        try:
            if update.taken:
                self.begin()
                cleared = self._step_groups(found, update)
                self.steps += 1
        finally:
            self._drop(found, cleared)

    def _step_groups(self, found: Mapping[int, Tensor], update: Update) -> bool:
        """Steps each group that has gradients; returns whether zeros are left in all of them."""
        cleared = True
        for group, members in self.groups.items():
            index = [i for i in found if i in members]
            if index:
                rate, gradients = update.learning_rate * group.factor, [found[i] for i in index]
                cleared &= bool(self.step(index, gradients, rate, update.scale, self.steps))
        return cleared

    @torch.no_grad()
    def drop_gradients(self) -> None:
        """Drops all gradients. Held ones stay, as zeros that count as none until backward adds to them."""
        self._drop(self.gradients(), False)

    def _drop(self, found: Mapping[int, Tensor], cleared: bool) -> None:
        if not self._cleared:
            for parameter in self.parameters:
                parameter.grad = None
            return
        if found and not cleared:
            torch._foreach_zero_(list(found.values()))
        for i, gradient in found.items():
            self._clear(i, gradient)

    def hold_gradients(self, adapter: str, written: Sequence[set[str]]) -> None:
        """Gives every Parameter a gradient that lasts, so that backward can add to it without autograd.

        Args:
            adapter: the adapter's name.
            written: of each Parameter, the names of the adapters to whose gradients backward has added, see
                `mlora_ext.ops.held`.
        """
        self._adapter, self._written = adapter, written
        self._cleared = [-1] * len(self.parameters)
        for i, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._clear(i, parameter.grad)
            elif not parameter.grad.is_sparse and parameter.grad.stride() != parameter.stride():
                parameter.grad = torch.zeros_like(parameter).copy_(parameter.grad)
        self.compiled = all(_serves(p) for p in self.parameters if p.requires_grad)

    def _clear(self, index: int, gradient: Tensor) -> None:
        self._cleared[index] = gradient._version
        self._written[index].discard(self._adapter)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Returns copies of `state` by `keys`; nothing if no Parameter has any."""
        if not any(self.state):
            return {}
        pairs = zip(self.keys, self.state, strict=True)
        return {name: [tensor.clone() for tensor in tensors] for name, tensors in pairs}

    def load_state(self, state: Sequence[Sequence[Tensor]]) -> None:
        """Copies a `state` into tensors that `begin` makes.

        Args:
            state: for each Parameter, its tensors.

        Raises:
            ValueError: a shape or a dtype differs from what `begin` makes.
        """
        before, self.state = self.state, [[] for _ in self.parameters]
        if any(state):
            self.begin()
        if [[(t.shape, t.dtype) for t in own] for own in self.state] != [
            [(t.shape, t.dtype) for t in own] for own in state
        ]:
            self.state = before
            raise ValueError("state: the optimizer's moments do not fit the adapter's Parameters")
        for own, tensors in zip(self.state, state, strict=True):
            for mine, tensor in zip(own, tensors, strict=True):
                mine.copy_(tensor)

    def load_state_dict(self, steps: int, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Loads the result of `state_dict`, from this stage or others.

        Args:
            steps: steps made.
            state: may hold other Parameters, too.

        Raises:
            ValueError: `state` lacks a Parameter of this stage, or does not fit.
        """
        if state and not set(self.keys) <= set(state):
            raise ValueError("state: the optimizer's moments do not fit the adapter's Parameters")
        self.load_state([state.get(name, ()) for name in self.keys])
        self.steps = steps


def _serves(parameter: Tensor) -> bool:
    """Returns whether our compiled operators serve a Parameter with a gradient: fp32, without gaps."""
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse or not LOADED or not parameter.is_cpu:
        return False
    # `empty_like` closes gaps
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return dense and parameter.dtype == gradient.dtype == torch.float32


def elements(shapes: Shapes) -> int:
    """Returns the number of elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes)
