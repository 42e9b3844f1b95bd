"""One stage: a module, and how it runs the messages of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .message import Message, MessageType
from .trace import Trace

LossFn = Callable[[Any, Any], tuple[Tensor, Any]]
"""`(output of the last stage, targets) -> (scalar to differentiate, report)`."""


class Hooks:
    """What a stage does besides running its module. This base class does nothing."""

    def around(
        self, train: bool, common: Mapping[str, Any], given: Sequence[Tensor]
    ) -> AbstractContextManager[Any]:
        """Returns a context for each forward and backward; `given` comes from the neighbouring stage."""
        return nullcontext()

    def after_backward(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this stage's entry in `Result.notes` after a backward: plain values and tensors."""
        return {}

    def traced(self, trace: Trace) -> None:
        """Is called once if the stage's spans are kept; reads from disk belong there, too."""

    def control(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """Returns this stage's answer to a control, plain values and tensors; see `Driver.control`."""
        raise ValueError(f"control: this stage knows no {verb!r}")


class Stage:
    """A module as a stage of a pipeline.

    The first stage gets a micro-batch's inputs, each later one the output of the stage before. A module may
    return one tensor or several. Floating-point tensors have gradients.

    Args:
        module: called with the activations of the stage before, and `common` by keyword.
        index: the stage's number of `count`, from 0.
        loss_fn: needed on the last stage only.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        loss_fn: LossFn | None,
        hooks: Hooks | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.module, self.index, self.count = module, index, count
        self.hooks = hooks or Hooks()
        self.trace = trace or Trace()
        if self.trace.limit:
            self.hooks.traced(self.trace)
        self._loss_fn = loss_fn
        # of each micro-batch between its forward and its backward: what it received, its outputs, `common`
        self._in_flight: dict[int, tuple[list[Tensor], list[Tensor], Mapping[str, Any]]] = {}

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which computes the loss."""
        return self.index == self.count - 1

    def forward(self, message: Message) -> Message:
        """Runs a micro-batch forward; takes a `FORWARD` and returns that for the next stage."""
        content = message.content
        with self._around(content), self._span(message):
            received, output = self._call(content)
        outputs = [output] if isinstance(output, Tensor) else list(output)
        if content["train"]:
            self._in_flight[message.number] = received, outputs, content["common"]
        passed = {key: content[key] for key in ("number", "train", "position", "common", "targets")}
        return Message(
            MessageType.FORWARD, {**passed, "activations": [output.detach() for output in outputs]}
        )

    def unit(self, message: Message) -> Message:
        """Runs a micro-batch through the last stage: forward, loss and, in training, backward.

        Takes a `FORWARD`; returns `BACKWARD` for the stage before, or `REPLY` without training.
        """
        content = message.content
        assert self._loss_fn is not None
        with self._around(content):
            with self._span(message):
                received, output = self._call(content)
                with torch.set_grad_enabled(content["train"]):
                    found = self._loss_fn(output, content["targets"])
                if isinstance(found, Tensor):
                    raise TypeError("loss_fn: expected (loss, report), got a tensor")
                loss, report = found
            if content["train"]:
                with self._span(message, "backward"):
                    torch.autograd.backward(loss)
        end = {key: content[key] for key in ("number", "position")} | {"report": report}
        if not content["train"]:
            return Message(MessageType.REPLY, {**end, "notes": []})
        note = self.hooks.after_backward(content["common"])
        gradients = [tensor.grad for tensor in received]
        return Message(MessageType.BACKWARD, {**end, "gradients": gradients, "notes": [note]})

    def backward(self, message: Message) -> Message:
        """Runs a micro-batch backward; takes a `BACKWARD` and returns that for the stage before."""
        received, outputs, common = self._in_flight.pop(message.number)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, message.content["gradients"], strict=True)
            if gradient is not None and output.requires_grad
        ]
        given = [gradient for _, gradient in pairs]
        with self.hooks.around(True, common, given), self._span(message):
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], given)
        notes = [self.hooks.after_backward(common), *message.content["notes"]]
        gradients = [tensor.grad for tensor in received]
        return Message(MessageType.BACKWARD, {**message.content, "gradients": gradients, "notes": notes})

    def _around(self, content: Mapping[str, Any]) -> AbstractContextManager[None]:
        return self.hooks.around(content["train"], content["common"], content.get("activations", ()))

    def _span(self, message: Message, sort: str = "") -> AbstractContextManager[None]:
        return self.trace.span("compute", sort or message.sort, message.number)

    def _call(self, content: Mapping[str, Any]) -> tuple[list[Tensor], Any]:
        """Returns the activations as leaves of this stage's graph, and the module's output."""
        train = content["train"]
        received = [
            tensor.detach().requires_grad_(train and (tensor.is_floating_point() or tensor.is_complex()))
            for tensor in content.get("activations", ())
        ]
        with torch.set_grad_enabled(train):
            return received, self.module(*received, **content.get("inputs", {}), **content["common"])
