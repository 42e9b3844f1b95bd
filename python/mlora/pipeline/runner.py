"""A stage at work: runs waiting messages in the order of its schedule, and passes on the results."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from .actions import ActionType
from .link import Link
from .message import Message, MessageType
from .order import Order, RoundPosition
from .stage import Stage


class PipelineError(RuntimeError):
    """A stage failed, or the link to a stage broke."""


class Runner:
    """The compute role of a stage. The receivers of its links fill its two queues.

    Controls and micro-batches without training run as soon as they are the oldest of their queue. The order
    decides about the others.

    `name` names this stage in errors that the others see; default: by its index.
    """

    def __init__(self, stage: Stage, order: Order, name: str = "") -> None:
        self.stage = stage
        self._name = name or f"stage {stage.index}"
        self.before: Link | None = None  # to the stage before, None at the first
        self.after: Link | None = None  # to the stage after, None at the last
        self.others: Sequence[Link] = ()  # the driver's, to further pipelines
        self.results: deque[Message] = deque()  # come back to the first stage, or from further pipelines
        self.failure: BaseException | None = None  # ended its work before the pipeline's end
        self.piece = self._pieces = 0  # number of the message that it works on, from 1; 0 while it waits
        self._order = order
        self._change = threading.Condition()
        self._forwards: deque[Message] = deque()
        self._backwards: deque[Message] = deque()

    def from_before(self, message: Message) -> None:
        """Queues a message of the stage before, or of the driver; from any thread."""
        self._take(self._forwards, message)

    def from_after(self, message: Message) -> None:
        """Queues a message of the stage after; from any thread."""
        self._take(self._backwards, message)

    def from_replica(self, message: Message) -> None:
        """Queues a result of a further pipeline, at the driver's stage; from any thread."""
        if message.sort is MessageType.END:
            return
        self._take(self._backwards if message.sort is MessageType.FAULT else self.results, message)

    def _take(self, waiting: deque[Message], message: Message) -> None:
        """Queues a message. The first fault replaces all others, because it names the cause."""
        with self._change:
            if message.sort is MessageType.FAULT:
                if waiting and waiting[0].sort is MessageType.FAULT:
                    return
                waiting.clear()
            waiting.append(message)
            self._change.notify()

    def run(self) -> None:
        """Works until the pipeline is closed.

        Raises PipelineError if another stage failed, or what the stage's module raises; the others are told.
        """
        while self.work():
            pass

    def serve(self) -> None:
        """Works like `run`, but keeps an error in `failure` only: the first stage has been told of it."""
        with ExitStack() as stack:
            stack.push(lambda kind, error, trace: error is self.failure)
            self.run()

    def work(self) -> bool:
        """Waits for one message and runs it; returns False after the pipeline's end.
        A result of a further pipeline ends the wait, too. Errors are those of `run`."""
        with ExitStack() as stack:
            stack.push(self._tell)
            found = self._next()
            self._pieces += 1
            self.piece = self._pieces
            stack.callback(setattr, self, "piece", 0)
            return found is None or self._run(*found)

    def _next(self) -> tuple[ActionType, Message] | None:
        with self._change:
            while True:
                if self.others and self.results:
                    return None
                kind = self._choice()
                if kind is not None:
                    return kind, (self._forwards if kind is ActionType.FORWARD else self._backwards).popleft()
                self._change.wait()

    def _choice(self) -> ActionType | None:
        if self._backwards and self._backwards[0].sort is not MessageType.BACKWARD:
            return ActionType.BACKWARD
        forward = self._forwards[0] if self._forwards else None
        if forward is not None and (forward.sort is not MessageType.FORWARD or not forward.content["train"]):
            return ActionType.FORWARD
        backward = self._backwards[0] if self._backwards else None
        return self._order.next_action(_position_of(forward), _position_of(backward))

    def _run(self, kind: ActionType, message: Message) -> bool:
        if message.sort is MessageType.FAULT:
            raise PipelineError(message.content["message"])
        link = self.before if kind is ActionType.FORWARD else self.after
        if link is not None:
            link.consumed(message)
        if message.sort is MessageType.END:
            return self._end(kind, message)
        message.wait()
        if kind is ActionType.BACKWARD:
            self._hand_back(self.stage.backward(message) if message.sort is MessageType.BACKWARD else message)
        elif message.sort is MessageType.CONTROL:
            self.answer(message, self.control(message.content["verb"], message.content["arguments"]))
        else:
            done = self.stage.forward(message)
            if self.after is not None:
                self.after.send(done)
                return True
            if done.sort is MessageType.BACKWARD:
                self._order.next_action(None, _position_of(message))
            self._hand_back(done)
        return True

    def control(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        """Does what the driver asks of all stages: `spans` itself, everything else by the stage's worker."""
        if verb == "spans":
            return self.stage.trace.by_the_wall()
        return self.stage.worker.control(verb, arguments)

    def answer(self, message: Message, answer: object) -> None:
        """Passes a control on with this stage's answer; the last stage sends the answers back."""
        content = message.content
        answers = [*content["answers"], answer]
        if self.after is not None:
            self.after.send(Message(MessageType.CONTROL, {**content, "answers": answers}))
        else:
            self._hand_back(Message(MessageType.REPLY, {"number": message.number, "answers": answers}))

    def _hand_back(self, message: Message) -> None:
        if self.before is not None:
            self.before.send(message)
        else:
            self.results.append(message)

    def _end(self, kind: ActionType, message: Message) -> bool:
        if kind is ActionType.FORWARD and self.after is not None:
            self.after.send(message)
            return True
        if self.before is not None:
            self.before.send(message)
        return False

    def _tell(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Drops waiting messages, keeps the error in `failure`, and tells the other stages of it.
        A stage without links does not keep the error: it may go on with the work that comes next."""
        with self._change:
            self._forwards.clear()
            self._backwards.clear()
        links = [link for link in (self.before, self.after, *self.others) if link is not None]
        if not links:
            return
        self.failure = error
        text = str(error) if isinstance(error, PipelineError) else f"{self._name}: {_line(error)}"
        for link in links:
            link.send(Message(MessageType.FAULT, {"message": text}))


def _position_of(message: Message | None) -> RoundPosition | None:
    return None if message is None else RoundPosition(*message.content["position"])


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
