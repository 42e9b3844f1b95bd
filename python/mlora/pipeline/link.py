"""A stage's link with a neighbour: a sender and a receiver, each a thread, under byte credits.

Receivers always drain what the neighbour may send, and sends never block compute. What a neighbour may send
is limited by credits: bytes that this stage has received and not yet worked on.
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
        out: to the neighbour.
        into: from the neighbour.
        deliver: told of each message that arrives, from the receiver's thread; of a `FAULT` where the link
            breaks.
        name: of the neighbour, for messages.
        credit_bytes: of tensors that may be on their way to the neighbour, or wait there. While these are
            at most a quarter of it, one message more may be larger.
        delay: seconds by which each message is held back, as a link's latency would; for measurements.
        trace: told of what is sent and received.
        keeps: whether what is delivered waits in this stage until `consumed`; otherwise credit is given at
            once.
    """

    def __init__(
        self,
        out: Port,
        into: Port,
        deliver: Callable[[Message], None],
        name: str,
        *,
        credit_bytes: int = CREDIT_BYTES,
        delay: float = 0.0,
        trace: Trace | None = None,
        keeps: bool = True,
    ) -> None:
        if credit_bytes < 1:
            raise ValueError(f"credit_bytes: expected at least 1, got {credit_bytes}")
        self._out, self._into, self._deliver, self._name = out, into, deliver, name
        self._credit_bytes, self._delay, self._trace = credit_bytes, delay, trace or Trace()
        self._keeps = keeps
        self._change = threading.Condition()
        self._queue: deque[tuple[float, int, Message]] = deque()
        self._outstanding = 0  # bytes that the neighbour has not given credit for
        self._owed = 0  # bytes that the neighbour has not been given credit for
        self._has_no_limit = False
        self._threads = [
            threading.Thread(target=run, name=f"{role} {name}", daemon=True)
            for role, run in (("send to", self._send_all), ("receive from", self._receive_all))
        ]

    @property
    def sent(self) -> int:
        """Bytes that went to the neighbour so far, headers and credit included; none between threads."""
        return self._out.sent

    def start(self) -> None:
        """Begin to send and receive."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Queue a message; returns at once. `END` and `FAULT` are the last ones.

        Raises:
            TypeError: if it holds something else than plain values and tensors.
        """
        size = message.size
        with self._change:
            if message.sort is MessageType.FAULT:
                self._queue.clear()
            self._queue.append((time.monotonic() + self._delay, size, message))
            self._change.notify_all()

    def consumed(self, message: Message) -> None:
        """Give the neighbour credit for a message that has left the queue of this stage."""
        with self._change:
            self._owed += message.size
            if self._must_give_credit():
                self._change.notify_all()

    def join(self, seconds: float | None = None) -> None:
        """Wait until both threads have ended, as they do after `END`."""
        for thread in self._threads:
            thread.join(seconds)

    def _send_all(self) -> None:
        self._until_end(self._send_next, self._out, self._into)

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
        """Credit rides on messages. Alone it goes where the neighbour may be waiting for it: that has more
        than a quarter outstanding, and what it has sent is owed when it has been consumed."""
        return self._owed > self._credit_bytes // 4

    def _receive_all(self) -> None:
        # the sender still tells the neighbour why
        self._until_end(self._receive_next, self._into)

    def _receive_next(self) -> bool:
        credit, message = self._into.read()
        if message is not None:
            self._trace.add("receive", message.sort, message.number, self._into.began)
        is_last = message is not None and message.sort in (MessageType.END, MessageType.FAULT)
        if credit or is_last:
            with self._change:
                self._outstanding -= credit
                if is_last:
                    self._has_no_limit = True  # the neighbour's sender has ended, and credit will not come
                self._change.notify_all()
        if message is None:
            return True
        self._deliver(message)
        if not self._keeps:
            self.consumed(message)
        return not is_last

    def _until_end(self, step: Callable[[], bool], *ports: Port) -> None:
        """Work until there is no more.

        Args:
            step: whether there is more.
            ports: closed on an error, so that nobody waits for them.
        """
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
        """Tell of any error; one that is no broken connection or full memory is raised, too."""
        if error is not None:
            text = " ".join(str(error).split())
            self._deliver(
                Message(MessageType.FAULT, {"message": f"the link with {self._name} broke: {text}"})
            )
            for port in ports:
                port.close()
        return isinstance(error, RuntimeError | OSError | MemoryError)
