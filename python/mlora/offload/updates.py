"""AdamW updates that run beside the backward pass, one unit after the other.

Source: LoHan (arXiv 2403.06504), section IV-C and Fig. 3. With one buffer a unit is read, updated and written
before the next one is read: the paper's naive active gradient offloading (Fig. 3a). With three, the next unit
is read and the last one is written meanwhile: its optimized form (Fig. 3b). Nothing is stale in either.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition, Thread

import torch
from mlora_ext._C import Ticket
from torch import Tensor

from mlora.offload.buffers import aligned, buffer
from mlora.offload.optimizer_states import OptimizerStates, Unit
from mlora.offload.options import BUFFERS, WAITING


@dataclass(frozen=True)
class AdamWStep:
    """The settings of one update: `torch.optim.AdamW`'s, the number of the step from 1 on, and a factor on
    the gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    scale: float = 1.0


@dataclass(frozen=True)
class Weights:
    """Where a parameter's new weights go, in the model's dtype.

    Attributes:
        memory: the weights, `[n]`; None if they are on disk.
        dtype: of the weights.
        write: begins to write numbers of them, from an index on; their memory has room up to a multiple of
            `ALIGN` bytes. None if they are in memory.
        block: in which streamed block they are; -1 = in none.
    """

    memory: Tensor | None
    dtype: torch.dtype
    write: Callable[[int, Tensor], Ticket] | None = None
    block: int = -1


@dataclass(eq=False)
class _Task:
    """One unit of a gradient that came."""

    unit: Unit
    gradient: Tensor
    step: AdamWStep
    frees: int  # bytes of the gradient, at its last unit


@dataclass(eq=False)
class _Buffer:
    """Memory for a unit's states and new weights, and the transfers that use it now."""

    states: Tensor
    weights: Tensor
    task: _Task | None = None
    tickets: tuple[Ticket, ...] = ()


class Updates:
    """Updates parameters in the order in which their gradients come, on a thread of its own.

    Args:
        states: the master weights and moments.
        weights: where new weights go, by parameter name.
        buffers: units under way at once.
        waiting: bytes of gradients that may wait; one that is larger may wait alone.

    Attributes:
        nbytes: of the buffers.
        on_span: is called with `read`, `update` or `write`, a Parameter's name, and when it began and ended,
            in nanoseconds of the machine's monotonic clock.

    After a failed read or write, or a gradient that is not finite, all calls raise its error.
    """

    def __init__(
        self,
        states: OptimizerStates,
        weights: dict[str, Weights],
        *,
        buffers: int = BUFFERS,
        waiting: int = WAITING,
    ) -> None:
        self._states, self._weights, self._waiting = states, weights, waiting
        numbers = max((u.count for units in states.units.values() for u in units), default=0)
        self._free = [_Buffer(buffer(states.largest), buffer(aligned(4 * numbers))) for _ in range(buffers)]
        self.nbytes = sum(b.states.nbytes + b.weights.nbytes for b in self._free)
        self._tasks: deque[_Task] = deque()
        self._left: dict[int, int] = {}  # units under way by block
        self._bytes, self._squares, self._hurries = 0, 0.0, False
        self._changed = Condition()
        self._ends = False
        self.on_span: Callable[[str, str, int, int], None] | None = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="optimizer updates", daemon=True)
        self._thread.start()

    def submit(self, name: str, gradient: Tensor, step: AdamWStep) -> None:
        """Takes over a parameter's gradient; waits while too many others wait.

        Raises:
            OSError: an earlier unit could not be read or written.
            FloatingPointError: an earlier gradient was not finite.
        """
        flat = gradient.detach().reshape(-1)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._bytes or self._bytes + flat.nbytes <= self._waiting or self._error
            )
            self._raise()
            if self._ends:
                raise RuntimeError(f"{name}: the optimizer's thread has ended")
            units = self._states.units[name]
            self._bytes += flat.nbytes
            block = self._weights[name].block
            self._left[block] = self._left.get(block, 0) + len(units)
            for unit in units:
                part = flat[unit.first : unit.first + unit.count]
                self._tasks.append(_Task(unit, part, step, flat.nbytes if unit is units[-1] else 0))
            self._changed.notify_all()

    def is_pending(self, block: int) -> bool:
        """Whether updates of a block are under way."""
        return self._left.get(block, 0) > 0

    def wait_for(self, block: int) -> None:
        """Waits until no update of a block is under way; raises as `submit`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left.get(block) or self._error)
            self._raise()

    def finish(self) -> float:
        """Waits for all updates; returns the sum of the squares of their gradients. Raises as `submit`."""
        with self._changed:
            self._hurries = True
            self._changed.wait_for(lambda: not any(self._left.values()) or self._error)
            self._hurries = False
            self._raise()
            squares, self._squares = self._squares, 0.0
            return squares

    def close(self) -> None:
        """Ends the thread, after the updates that were submitted; `submit` raises RuntimeError then."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        with ExitStack() as stack:
            stack.push(self._stopped)
            self._work()

    def _stopped(self, _: object, error: BaseException | None, __: object) -> bool:
        """Keeps an error for the calls above."""
        with self._changed:
            self._error = error
            self._tasks.clear()
            self._changed.notify_all()
        return True

    def _work(self) -> None:
        reading: deque[_Buffer] = deque()
        writing: deque[_Buffer] = deque()
        while True:
            while writing and all(ticket.done for ticket in writing[0].tickets):
                self._finish(writing.popleft())
            while self._free and (task := self._take(waits=not reading and not writing)) is not None:
                reading.append(self._begin(task))
            if reading:
                found = reading.popleft()
                self._update(found)
                writing.append(found)
            elif writing:
                self._finish(writing.popleft())
            else:
                return

    def _take(self, *, waits: bool) -> _Task | None:
        """Returns the next task, or None if there is none; `waits` for one until `close`."""
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: self._tasks or self._ends)
            return self._tasks.popleft() if self._tasks else None

    def _begin(self, task: _Task) -> _Buffer:
        found = self._free.pop()
        found.task = task
        if self._states.in_memory(task.unit) is None:
            found.tickets = (self._states.read(task.unit, found.states),)
        return found

    def _update(self, found: _Buffer) -> None:
        assert found.task is not None
        task, unit = found.task, found.task.unit
        self._settle(found, "read")
        begin = time.monotonic_ns()
        kept = self._states.in_memory(unit)
        weights, first, second = unit.views(found.states if kept is None else kept)
        goal, step = self._weights[unit.name], task.step
        if goal.memory is None:
            new = found.weights[: unit.count * goal.dtype.itemsize].view(goal.dtype)
        else:
            new = goal.memory[unit.first : unit.first + unit.count]
        square = torch.ops.mlora_ext.adamw(
            [task.gradient],
            [weights],
            [first],
            [second],
            [new],
            step.lr,
            step.beta1,
            step.beta2,
            step.eps,
            step.weight_decay,
            step.step,
            step.scale,
            False,
            0 if self._hurries else 1,
        )
        if not math.isfinite(square):
            raise FloatingPointError(
                f"{unit.name}: the gradient is not finite, and weights are updated already; go on from the "
                "last checkpoint"
            )
        if self.on_span is not None:
            self.on_span("update", unit.name, begin, time.monotonic_ns())
        tickets = [] if kept is not None else [self._states.write(unit, found.states)]
        if goal.write is not None:
            tickets.append(goal.write(unit.first, new))
        found.tickets = tuple(tickets)
        with self._changed:
            self._squares += square
            self._bytes -= task.frees
            task.gradient = task.gradient.new_empty(0)
            self._changed.notify_all()

    def _settle(self, found: _Buffer, what: str) -> None:
        """Waits for a buffer's transfers."""
        for ticket in found.tickets:
            ticket.wait()
            if self.on_span is not None and found.task is not None:
                begin, end = (round(1e9 * at) for at in ticket.span)
                self.on_span(what, found.task.unit.name, begin, end)

    def _finish(self, found: _Buffer) -> None:
        self._settle(found, "write")
        assert found.task is not None
        block = self._weights[found.task.unit.name].block
        found.task, found.tickets = None, ()
        self._free.append(found)
        with self._changed:
            self._left[block] -= 1
            self._changed.notify_all()
