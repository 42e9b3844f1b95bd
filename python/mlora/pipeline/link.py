"""A stage's link to a neighbour: a sender thread and a receiver thread, with byte credits.

Receivers always drain what the neighbour may send, and sends never block compute. Credits limit the bytes
that a neighbour has sent and this stage has not yet worked on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from .message import Message, MessageType
from .port import Port
from .trace import Trace

CREDIT_BYTES = 1 << 30


class Link:
    """Both directions between a stage and a neighbour.

    Args:
        deliver: called in the receiver's thread with each message, and with a `FAULT` if the link breaks.
        name: the neighbour's, for messages.
        credit_bytes: limit on the bytes of tensors that are on their way to the neighbour or wait there.
            While at most a quarter of it is used, one more message may exceed the limit.
        delay: seconds to hold each message back, to imitate a link's latency in measurements.
        keeps: whether delivered messages wait in this stage until `consumed`; else credit returns at once.
    """

    def __init__(
        self,
        out: Port,
        into: Port,
        deliver: Callable[[Message], None],
        name: str,
        credit_bytes: int = CREDIT_BYTES,
        delay: float = 0.0,
        trace: Trace | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        if credit_bytes < 1:
            raise ValueError(f"credit_bytes: expected at least 1, got {credit_bytes}")
        self._out, self._into, self._deliver, self._name = out, into, deliver, name
        self._credit_bytes, self._delay, self._trace = credit_bytes, delay, trace or Trace()
        self._keeps = keeps
        self._change = threading.Condition()
        self._queue: deque[tuple[float, int, Message]] = deque()
        self._outstanding = 0  # sent bytes that the neighbour has not given credit for
        self._owed = 0  # consumed bytes that the neighbour has not been given credit for
        self._has_no_limit = False
        self._threads = [
            threading.Thread(target=self._until_end, args=args, name=f"{role} {name}", daemon=True)
            for role, args in (
                ("send to", (self._send_next, out, into)),
                # `out` stays open on an error: the sender still tells the neighbour why
                ("receive from", (self._receive_next, into)),
            )
        ]

    @property
    def sent(self) -> int:
        """Bytes sent to the neighbour so far, with headers and credit; 0 between threads."""
        return self._out.sent

    def start(self) -> None:
        """Starts both threads."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Queues a message and returns at once; `END` and `FAULT` are the last ones.
        On a GPU the current stream is the one that computes the message's tensors."""
        size = message.size
        if message.ready is None:
            message.record()
        with self._change:
            if message.sort is MessageType.FAULT:
                self._queue.clear()
            self._queue.append((time.monotonic() + self._delay, size, message))
            self._change.notify_all()

    def consumed(self, message: Message) -> None:
        """Returns credit to the neighbour for a message that has left this stage's queue."""
        with self._change:
            self._owed += message.size
            if self._must_give_credit():
                self._change.notify_all()

    def join(self, seconds: float | None = None) -> None:
        """Waits until both threads have ended, as they do after `END`."""
        for thread in self._threads:
            thread.join(seconds)

    def _send_next(self) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._may_send() or self._must_give_credit())
            due, size, message = self._queue.popleft() if self._may_send() else (0.0, 0, None)
            credit, self._owed = self._owed, 0
            self._outstanding += size
        if message is None:
            self._out.write(credit, None)
            return True
        if self._delay:
            time.sleep(max(0.0, due - time.monotonic()))
        with self._trace.span("send", message.sort, message.number):
            self._out.write(credit, message)
        return message.sort not in (MessageType.END, MessageType.FAULT)

    def _may_send(self) -> bool:
        if not self._queue:
            return False
        size = self._queue[0][1]
        few = self._outstanding <= self._credit_bytes // 4
        enough = few or self._outstanding + size <= self._credit_bytes
        return not size or enough or self._has_no_limit

    def _must_give_credit(self) -> bool:
        """Whether to send credit without a message.
        The neighbour waits for credit only if more than a quarter of the limit is outstanding. Once this
        stage has consumed all of that, it owes more than a quarter."""
        return self._owed > self._credit_bytes // 4

    def _receive_next(self) -> bool:
        credit, message = self._into.read()
        if message is not None:
            self._trace.add("receive", message.sort, message.number, self._into.began)
        is_last = message is not None and message.sort in (MessageType.END, MessageType.FAULT)
        if credit or is_last:
            with self._change:
                self._outstanding -= credit
                if is_last:
                    self._has_no_limit = True  # the neighbour's sender has ended: no more credit comes
                self._change.notify_all()
        if message is None:
            return True
        self._deliver(message)
        if not self._keeps:
            self.consumed(message)
        return not is_last

    def _until_end(self, step: Callable[[], bool], *ports: Port) -> None:
        """Repeats `step` while it returns True; on an error closes `ports`, so that nobody waits for them."""
        with ExitStack() as stack:
            stack.push(partial(self._has_broken, ports))
            while step():
                pass

    def _has_broken(
        self,
        ports: Sequence[Port],
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Delivers any error as a `FAULT`, and suppresses broken connections and full memory only."""
        if error is not None:
            text = " ".join(str(error).split())
            self._deliver(
                Message(MessageType.FAULT, {"message": f"lost the connection to {self._name}: {text}"})
            )
            for port in ports:
                port.close()
        return isinstance(error, RuntimeError | OSError | MemoryError)
