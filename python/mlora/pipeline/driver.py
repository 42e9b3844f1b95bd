"""The driver feeds micro-batches into a pipeline's first stage and collects their results there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from .link import Link
from .message import Message, MessageType
from .order import ALONE, RoundPosition
from .runner import PipelineError, Runner
from .stage import ModuleCall, Verb
from .trace import Entry


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a micro-batch."""

    report: Any  # the loss function's report
    # the value of `after_backward` on each stage, in stage order; empty without training
    notes: Sequence[Any]


class Driver:
    """Feeds a pipeline. The first stage computes in the calling thread, inside these calls.

    `submit` and `step` run one round at a time. `start` and `finish` keep the pipeline full: micro-batches
    enter while others are under way, and leave in the order in which they entered.

    Args:
        first: the first stage's runner.
        links: all links that belong to the pipeline; they are started.
        replicas: those to the first stages of further pipelines, which run other micro-batches.
    """

    def __init__(self, first: Runner, links: Sequence[Link] = (), replicas: Sequence[Link] = ()) -> None:
        self._first, self._links, self._replicas = first, links, replicas
        first.others = replicas
        self._waiting: list[tuple[ModuleCall, bool]] = []
        self._under_way: set[int] = set()
        self._results: dict[int, Message] = {}
        self._numbers = 0
        self._entries: deque[Entry] = deque(maxlen=first.stage.trace.limit)
        self._closed = False
        for link in links:
            link.start()

    def submit(
        self,
        inputs: Mapping[str, Any],
        targets: Any,
        *,
        common: Mapping[str, Any] | None = None,
        train: bool = True,
    ) -> None:
        """Queues a micro-batch for the next `step`.

        Args:
            inputs: keyword arguments of the first stage.
            targets: passed to the loss function.
            common: keyword arguments of every stage.
            train: whether to run backward. Otherwise forward and loss run without gradients.

        Raises:
            TypeError: `inputs` is not a mapping.
            RuntimeError: after `close`.
        """
        self._check_open()
        call = ModuleCall(inputs, targets, dict(common or {}))
        self._waiting.append((replace(call, inputs=dict(inputs)), train))

    def step(self) -> list[Any]:
        """Runs all queued micro-batches to their end, as one round of the schedule.

        Returns:
            The loss function's reports, in the order of submission.

        Raises:
            RuntimeError: after `close`.
            PipelineError: another stage failed; within one process its exception is the cause.
        """
        self._check_open()
        waiting, self._waiting = self._waiting, []
        size = sum(train for _, train in waiting)
        numbers, index = [], 0
        for batch, train in waiting:
            numbers.append(self.start(batch, train=train, position=RoundPosition(index, size)))
            index += train
        return [self.finish(number).report for number in numbers]

    def start(
        self,
        batch: Any,
        *,
        train: bool = True,
        position: RoundPosition = ALONE,
        stream: str = "",
        rows: int = 1,
        replica: int = 0,
    ) -> int:
        """Lets a micro-batch enter the pipeline and returns at once.

        Args:
            batch: a record (`mlora.records`) that the stages' workers know, such as a `ModuleCall`.
            train: whether to run backward.
            position: its position in its round, for schedules that have rounds.
            stream: the stream that it belongs to, for traces.
            rows: its number of rows, for traces.
            replica: the pipeline that it enters; 0 is the one that `first` belongs to.

        Returns:
            The micro-batch's number, for `finish`.

        Raises:
            RuntimeError: after `close`.
        """
        self._check_open()
        self._numbers += 1
        number = self._numbers
        self._under_way.add(number)
        self._entries.append(Entry(number, stream, position.index, rows, train, replica))
        content = {
            "number": number,
            "train": train,
            "position": [position.index, position.size],
            "batch": batch,
        }
        message = Message(MessageType.FORWARD, content)
        if replica:
            self._replicas[replica - 1].send(message)
        else:
            self._first.from_before(message)
        return number

    def first_done(self, numbers: Sequence[int]) -> int:
        """Works on the first stage until one of these micro-batches has ended; returns its number.

        If several have, the first of them in `numbers`. Raises as `finish`.
        """
        if self._under_way.isdisjoint(numbers):
            self._refuse(numbers)
        while True:
            found = next((number for number in numbers if number in self._results), None)
            if found is not None:
                return found
            self._take_results()

    def finish(self, number: int) -> Result:
        """Works on the first stage until a micro-batch has ended.

        Args:
            number: returned by `start`.

        Returns:
            The micro-batch's result.

        Raises:
            ValueError: the micro-batch is not under way.
            RuntimeError: after `close`.
            PipelineError: another stage failed.
        """
        content = self._await(number).content
        return Result(content["report"], content["notes"])

    def control(
        self,
        verb: Verb,
        arguments: Mapping[str, Any] | None = None,
        *,
        first_done: bool = False,
        replica: int = 0,
    ) -> list[Any]:
        """Asks every stage to do something between micro-batches, and waits for the answers.

        A control may overtake micro-batches that have started but that the first stage has not begun. No
        micro-batch that starts later overtakes it. So nothing that is under way may depend on it.

        Raises what the first stage's `control` raises, before the other stages are asked; else as `finish`.
        Returns the stages' answers, in stage order. `verb`, a method or its name, and `arguments`, plain
        values, tensors and records, go to `Worker.control`. With `first_done` the caller has done it for the
        first stage, whose answer is None.
        """
        self._check_open()
        arguments, verb = arguments or {}, verb if isinstance(verb, str) else verb.__name__
        content = {"number": self._numbers + 1, "verb": verb, "arguments": arguments, "answers": []}
        message = Message(MessageType.CONTROL, content)
        if replica:
            self._replicas[replica - 1].send(message)
        else:
            answer = None if first_done else self._first.control(verb, arguments)
            self._first.answer(message, answer)
        self._numbers += 1
        number = self._numbers
        self._under_way.add(number)
        return list(self._await(number).content["answers"])

    def entries(self) -> list[Entry]:
        """Returns the latest micro-batches that entered; empty without a trace."""
        return list(self._entries)

    def abort(self, error: BaseException) -> None:
        """Ends all stages as if the first one had failed with this error."""
        if not self._closed and self._first.failure is None:
            self._first.fail(error)
            self._drop()
        self.close()

    def close(self) -> None:
        """Drops queued micro-batches, ends the stages, and refuses further work.

        If micro-batches are under way, it calls `abort`. Raises PipelineError if another stage fails first.
        """
        self._end_stages()
        self.join()

    def join(self) -> None:
        """Waits until the links have ended, as they do when the pipeline is closed."""
        for link in self._links:
            link.join()

    def _end_stages(self) -> None:
        self._waiting.clear()
        if self._closed:
            return
        if self._under_way and self._first.failure is None:
            self.abort(PipelineError("the pipeline was closed with micro-batches under way"))
            return
        self._closed = True
        if self._first.failure is not None:
            return
        self._first.from_before(Message(MessageType.END))
        for link in self._replicas:
            link.send(Message(MessageType.END))
        while self._first.work():
            # nobody asks for them; with further pipelines `work` does nothing else until they are taken
            self._first.results.clear()

    def _check_open(self) -> None:
        if self._first.stage.index:
            raise RuntimeError("the first stage's process feeds the pipeline; this one calls serve")
        if self._closed:
            raise RuntimeError("the pipeline is closed")
        if self._first.failure is not None:
            raise PipelineError(f"the pipeline has failed: {self._first.failure}") from self._first.failure

    def _await(self, number: int) -> Message:
        if number not in self._under_way:
            self._refuse([number])
        self._under_way.remove(number)
        while number not in self._results:
            self._take_results()
        return self._results.pop(number)

    def _refuse(self, numbers: Sequence[int]) -> NoReturn:
        self._check_open()
        text = " or ".join(map(str, numbers))
        raise ValueError(f"number: micro-batch {text} is not under way; an error ends all of them")

    def _ended(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Hears of an error that has ended all that was under way."""
        self._drop()

    def _drop(self) -> None:
        """Forgets everything that is under way: after an error none of it comes back."""
        self._under_way.clear()
        self._results.clear()

    def _take_results(self) -> None:
        """Works until something has come back, and keeps it."""
        while not self._first.results:
            with ExitStack() as unless_done:
                unless_done.push(self._ended)
                self._check_open()
                self._first.work()
                unless_done.pop_all()
        while self._first.results:
            message = self._first.results.popleft()
            message.wait()
            self._results[message.number] = message
