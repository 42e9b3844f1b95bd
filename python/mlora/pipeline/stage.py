"""One stage: what it does with a micro-batch, and how it runs the messages of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..records import record
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

    def after_backward(self, common: Mapping[str, Any]) -> Any:
        """Returns this stage's entry in `Result.notes` after a backward: plain values and tensors."""
        return {}

    def traced(self, trace: Trace) -> None:
        """Is called once if the stage's spans are kept; reads from disk belong there, too."""

    def control(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """Returns this stage's answer to a control, plain values and tensors; see `Driver.control`."""
        raise ValueError(f"control: this stage knows no {verb!r}")


_Method = TypeVar("_Method", bound=Callable[..., Any])


def verb(method: _Method) -> _Method:
    """Lets the driver call a method of a `Worker` on every stage: a decorator."""
    method.is_verb = True  # type: ignore[attr-defined]
    return method


Verb = str | Callable[..., Any]
"""A method that is a `verb`, or its name."""


def verb_of(owner: object, name: str) -> Callable[..., Any]:
    """Returns a method that is a `verb`; raises ValueError if there is none of this name."""
    method: Callable[..., Any] | None = getattr(owner, name, None)
    if method is None or not getattr(method, "is_verb", False):
        raise ValueError(f"control: this stage knows no {name!r}")
    return method


class Worker(ABC):
    """What one stage does with micro-batches, which are records of any kind.

    Attributes:
        device: where it computes.
    """

    device: torch.device

    @abstractmethod
    def forward(self, given: Sequence[Tensor], batch: Any) -> Tensor | Sequence[Tensor]:
        """Runs a micro-batch.

        Args:
            given: what the stage before returned; nothing on the first stage.
            batch: the micro-batch.
        """

    @abstractmethod
    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Any]:
        """Returns the scalar to differentiate, and a report for the driver; on the last stage only."""

    def for_next(self, batch: Any) -> Any:
        """Returns what the stage after this one gets of a micro-batch."""
        return batch

    def around(self, train: bool, batch: Any, given: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Returns a context for each forward and backward; `given` comes from the neighbouring stage."""
        return nullcontext()

    def after_backward(self, batch: Any) -> Any:
        """Returns this stage's entry in `Result.notes` after a backward."""
        return {}

    def traced(self, trace: Trace) -> None:  # noqa: B027  # most workers have nothing to do
        """Is called once if the stage's spans are kept; reads from disk belong there, too."""

    def control(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """Calls one of the methods that are a `verb`; see `Driver.control`."""
        return verb_of(self, verb)(**arguments)


@record
@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A micro-batch of modules of any kind.

    Attributes:
        inputs: keyword arguments of the first stage.
        targets: passed to the loss function.
        common: keyword arguments of every stage.

    Raises:
        TypeError: `inputs` is not a mapping.
    """

    inputs: Mapping[str, Any]
    targets: Any
    common: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, Mapping):
            kind = type(self.inputs).__name__
            raise TypeError(f"inputs: expected a dict of the first stage's keyword arguments, got {kind}")


class ModuleWorker(Worker):
    """A module of any kind as a stage's work; its micro-batches are a `ModuleCall`.

    Args:
        module: called with the activations of the stage before, and `common` by keyword.
        loss_fn: needed on the last stage only.
        hooks: what the stage does besides.
    """

    def __init__(self, module: nn.Module, loss_fn: LossFn | None, hooks: Hooks | None = None) -> None:
        self._module, self._loss_fn, self._hooks = module, loss_fn, hooks or Hooks()
        tensors = (*module.parameters(), *module.buffers())
        held = (tensor.device for tensor in tensors if not tensor.is_meta)
        self.device = next(held, torch.device("cpu"))

    def forward(self, given: Sequence[Tensor], batch: ModuleCall) -> Any:
        return self._module(*given, **batch.inputs, **batch.common)

    def loss(self, output: Any, batch: ModuleCall) -> tuple[Tensor, Any]:
        assert self._loss_fn is not None
        found = self._loss_fn(output, batch.targets)
        if isinstance(found, Tensor):
            raise TypeError("loss_fn: expected (loss, report), got a tensor")
        return found

    def for_next(self, batch: ModuleCall) -> ModuleCall:
        return replace(batch, inputs={})

    def around(self, train: bool, batch: ModuleCall, given: Sequence[Tensor]) -> AbstractContextManager[Any]:
        return self._hooks.around(train, batch.common, given)

    def after_backward(self, batch: ModuleCall) -> Any:
        return self._hooks.after_backward(batch.common)

    def traced(self, trace: Trace) -> None:
        self._hooks.traced(trace)

    def control(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        return self._hooks.control(verb, arguments)


def worker_of(stage: nn.Module | Worker, loss_fn: LossFn | None, hooks: Hooks | None) -> Worker:
    """Returns a stage's worker: itself, or a module's."""
    return stage if isinstance(stage, Worker) else ModuleWorker(stage, loss_fn, hooks)


class Stage:
    """A worker as a stage of a pipeline.

    The first stage gets no activations, each later one the output of the stage before: one tensor or several.
    Floating-point tensors have gradients.

    Args:
        worker: does the stage's work.
        index: the stage's number of `count`, from 0.
    """

    def __init__(self, worker: Worker, index: int, count: int, trace: Trace | None = None) -> None:
        self.worker, self.index, self.count = worker, index, count
        self.trace = trace or Trace()
        if self.trace.limit:
            worker.traced(self.trace)
        # of each micro-batch between its forward and its backward: what it received, its outputs, itself
        self._in_flight: dict[int, tuple[list[Tensor], list[Tensor], Any]] = {}

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which computes the loss."""
        return self.index == self.count - 1

    def forward(self, message: Message) -> Message:
        """Runs a micro-batch: takes a `FORWARD`, and returns that for the next stage.

        The last stage runs forward, loss and, in training, backward as one unit. It returns a `BACKWARD` for
        the stage before, or a `REPLY` without training.
        """
        content, worker = message.content, self.worker
        batch, train, given = content["batch"], content["train"], content.get("activations", ())
        with worker.around(train, batch, given):
            with self.trace.span("compute", message.sort, message.number), torch.set_grad_enabled(train):
                # leaves of this stage's graph
                received = [
                    tensor.detach().requires_grad_(
                        train and (tensor.is_floating_point() or tensor.is_complex())
                    )
                    for tensor in given
                ]
                output = worker.forward(received, batch)
                loss, report = worker.loss(output, batch) if self.is_last else (None, None)
            if train and loss is not None:
                with self.trace.span("compute", "backward", message.number):
                    torch.autograd.backward(loss)
        if not self.is_last:
            outputs = [output] if isinstance(output, Tensor) else list(output)
            if train:
                self._in_flight[message.number] = received, outputs, batch
            kept = {key: content[key] for key in ("number", "train", "position")}
            activations = [output.detach() for output in outputs]
            return Message(
                MessageType.FORWARD, {**kept, "batch": worker.for_next(batch), "activations": activations}
            )
        end = {"number": content["number"], "position": content["position"], "report": report}
        if not train:
            return Message(MessageType.REPLY, {**end, "notes": []})
        notes, gradients = [worker.after_backward(batch)], [tensor.grad for tensor in received]
        return Message(MessageType.BACKWARD, {**end, "gradients": gradients, "notes": notes})

    def backward(self, message: Message) -> Message:
        """Runs a micro-batch backward; takes a `BACKWARD` and returns that for the stage before."""
        received, outputs, batch = self._in_flight.pop(message.number)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, message.content["gradients"], strict=True)
            if gradient is not None and output.requires_grad
        ]
        given = [gradient for _, gradient in pairs]
        span = self.trace.span("compute", message.sort, message.number)
        with self.worker.around(True, batch, given), span:
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], given)
        notes = [self.worker.after_backward(batch), *message.content["notes"]]
        gradients = [tensor.grad for tensor in received]
        return Message(MessageType.BACKWARD, {**message.content, "gradients": gradients, "notes": notes})
