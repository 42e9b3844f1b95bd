"""AdamW whose fp32 weights and moments are out of memory, for the Parameters of a PyTorch optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from mlora_ext._C import Ticket
from torch import Tensor, nn

from mlora.offload.block_layout import BlockLayout
from mlora.offload.disk import Disk, buffer
from mlora.offload.optimizer_states import OptimizerStates
from mlora.offload.states_on_disk import load_states, save_states
from mlora.offload.stream import BlockStream
from mlora.offload.updates import AdamWStep, Updates, Weights

_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


class OutOfCoreAdamW:
    """Does the work of a `torch.optim.AdamW` in its place; see `mlora.offload.offloaded`.

    Args:
        model: holds the Parameters.
        given: the optimizer; `step` is replaced until `close`.
        disk: holds the states if they are `on_disk`, and the streamed weights.
        active: whether a Parameter is updated as soon as its gradient is there.
        buffers: units under way at once.

    Attributes:
        states: fp32 weights and moments.
        grad_norm: norm of the latest step's gradients.

    Raises:
        ValueError: the optimizer is no plain, new AdamW, or has Parameters that the model does not have.
        OSError: a folder for scratch files is missing, or its disk lacks room.
    """

    def __init__(
        self,
        model: nn.Module,
        given: torch.optim.Optimizer,
        disk: Disk,
        *,
        on_disk: bool,
        active: bool,
        buffers: int,
    ) -> None:
        self.grad_norm = 0.0
        self._given, self._disk, self._active, self._buffers = given, disk, active, buffers
        self._parameters = _trained(model, given)
        self._groups = {id(p): group for group in given.param_groups for p in group["params"]}
        self._counts = dict.fromkeys(self._parameters, 0)
        self._came: set[str] = set()
        self._accumulates = False
        self._goals: dict[str, Weights] = {}
        self._updates: Updates | None = None
        self._undo = ExitStack()
        numbers = {name: p.numel() for name, p in self._parameters.items()}
        self.states = OptimizerStates(numbers, disk, on_disk=on_disk)
        for name, parameter in self._parameters.items():
            self.states.put(name, parameter.detach())

    def begin(self, stream: BlockStream | None, layouts: Sequence[BlockLayout]) -> None:
        """Takes over the optimizer, once the weights are where they stay."""
        blocks = {name: block for block, layout in enumerate(layouts) for name in layout.tensors}
        for name, parameter in self._parameters.items():
            if name in blocks:
                assert stream is not None
                block = blocks[name]
                self._goals[name] = _streamed(name, block, self._disk, stream, layouts[block])
            else:
                if not parameter.is_contiguous():
                    raise ValueError(f"optimizer: the memory of {name} is not contiguous")
                self._goals[name] = Weights(parameter.detach().view(-1), parameter.dtype)
        self._updates = Updates(self.states, self._goals, buffers=self._buffers)
        self._undo.callback(self._updates.close)
        if stream is not None:
            stream.wait_for, stream.waits = self._updates.wait_for, self._updates.is_pending
        if self._active:
            for name, parameter in self._parameters.items():
                hook = functools.partial(self._gradient_came, name)
                self._undo.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        given: Any = self._given

        @functools.wraps(given.step)  # with the marks of learning-rate schedules
        def step(closure: None = None) -> None:
            self.step(closure)

        given.step = step
        self._undo.callback(setattr, given, "step", _gone)

    def close(self) -> None:
        """Gives the optimizer back, without states: its `step` says so."""
        self._undo.close()

    def save(self, folder: str | Path) -> None:
        """Writes weights, moments and counts of steps to a folder, which holds one whole version at any time.

        Call it between steps. Raises OSError if the disk lacks room; the version before stays then.
        """
        save_states(Path(folder), self.states, self._counts)

    def load(self, folder: str | Path) -> None:
        """Takes over what `save` wrote: the weights as well.

        Raises:
            OSError: a file is missing, or cannot be read.
            ValueError: it is of another model, or was damaged.
        """
        counts, states = load_states(Path(folder), self.states, self._disk)
        for unit, weights in states:
            goal = self._goals[unit.name]
            if goal.memory is not None:
                goal.memory[unit.first : unit.first + unit.count].copy_(weights)
            else:
                assert goal.write is not None
                size = unit.count * goal.dtype.itemsize
                goal.write(unit.first, buffer(size)[:size].view(goal.dtype).copy_(weights)).wait()
        self._counts.update(counts)

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
            ValueError: there is a closure.
        """
        if closure is not None:
            raise ValueError("step: a closure is not supported")
        assert self._updates is not None
        if not self._active:
            self._submit_all()
        self.grad_norm = math.sqrt(self._updates.finish())
        self._came.clear()
        self._given._opt_called = True  # type: ignore[attr-defined]

    def _submit_all(self) -> None:
        """Submits the gradients that are there, in the order of a backward pass."""
        waiting = [(name, p) for name, p in self._parameters.items() if p.grad is not None]
        for name, parameter in waiting:
            assert parameter.grad is not None
            if not torch.isfinite(torch.linalg.vector_norm(parameter.grad)):
                raise FloatingPointError(f"{name}: the gradient is not finite; nothing was updated")
        for name, parameter in reversed(waiting):
            self._submit(name, parameter)

    def _gradient_came(self, name: str, parameter: Tensor) -> None:
        if not self._accumulates:
            if name in self._came:
                raise RuntimeError(
                    f"{name}: a second gradient came before optimizer.step(); to accumulate gradients, run "
                    "all backward passes but the last inside accumulate()"
                )
            self._came.add(name)
            self._submit(name, parameter)

    def _submit(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        group = self._groups[id(parameter)]
        self._counts[name] += 1
        assert self._updates is not None
        assert gradient is not None
        step = AdamWStep(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=self._counts[name],
        )
        self._updates.submit(name, gradient, step)


def _gone(*_: object) -> None:
    raise RuntimeError("optimizer.step: its states went with `mlora.offload.offloaded`; make a new optimizer")


def _trained(model: nn.Module, given: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Returns the optimizer's Parameters by name, in the model's order."""
    if type(given) is not torch.optim.AdamW:
        raise ValueError(f"optimizer: expected a torch.optim.AdamW, got {type(given).__name__}")
    if given.state:
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


def _streamed(name: str, block: int, disk: Disk, stream: BlockStream, layout: BlockLayout) -> Weights:
    """Returns where a streamed weight goes: to its file, and into its slot if it is in one."""
    stored = layout.tensors[name]

    def write(first: int, values: Tensor) -> Ticket:
        stream.write(block, name, first, values)
        return disk.write(stored.file, stored.offset + first * stored.dtype.itemsize, values)

    return Weights(None, stored.dtype, write, block)
