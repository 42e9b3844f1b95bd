"""The contenders of this project: a stage of `mlora.pipeline` in each process.

SLEEP KERNELS, stages that compute nothing and sleep, time pipelines of more stages than there are cores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from mlora.pipeline import Hooks, ModuleCall, Neighbours, RoundPosition, StageProcess
from mlora.pipeline.trace import Span
from torch import Tensor, nn

from pipeline.places import Case, Item, Turn, rounds

_SPANS = 1 << 18
Batch = Callable[[Item], Tensor]


class Learner(Protocol):
    """What is updated after a step."""

    def step(self, adapter: int) -> None: ...


class Ours:
    """One process's stage; a new pipeline over the same links for each turn."""

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        trained: Learner,
        batch: Batch,
        loss: Callable[[Tensor, Tensor], Tensor],
        neighbours: Neighbours,
        place: tuple[int, int],
    ) -> None:
        self._case, self._module, self._trained, self._batch = case, module, trained, batch
        self._loss, self._neighbours, self._place = loss, neighbours, place
        self._shortest = 0.0

    def turn(self, steps: int) -> Turn:
        """Run so many steps of each adapter."""
        case, (stage, stages) = self._case, self._place
        after = _AfterBackward(self._trained)
        delay = case.delay * self._shortest
        process = StageProcess(
            self._module,
            stage,
            stages,
            self._neighbours,
            case.schedule,
            self._report,
            hooks=after,
            in_flight=(case.at_once or case.adapters) * case.micro_batches,
            delay=delay,
            trace=_SPANS,
        )
        turn = Turn(delay=delay)
        if stage:
            process.serve()
        else:
            _Feed(process, case, steps, self._batch, turn).run()
        turn.spans = process.runner.stage.trace.spans() + after.spans
        links = (process.runner.before, process.runner.after)
        turn.sent = sum(link.sent for link in links if link is not None)
        self._measure(turn)
        return turn

    def _report(self, output: Tensor, targets: Mapping[str, Any]) -> tuple[Tensor, float]:
        loss = self._loss(output, targets["ids"])
        return loss / self._case.micro_batches, loss.detach()

    def _measure(self, turn: Turn) -> None:
        """The shortest forward of all stages, from which the delay of the next turn follows."""
        own = [s.end - s.begin for s in turn.spans if s.role == "compute" and s.sort == "forward"]
        shortest = torch.tensor(median(own) / 1e9, dtype=torch.float64)
        dist.all_reduce(shortest, dist.ReduceOp.MIN)
        self._shortest = float(shortest)


class _AfterBackward(Hooks):
    """Updates an adapter on this stage as soon as its last micro-batch has passed backward here."""

    def __init__(self, trained: Learner) -> None:
        self._trained = trained
        self.spans: list[Span] = []

    def after_backward(self, common: Mapping[str, Any]) -> dict[str, Any]:
        if common["number"]:
            begin = time.monotonic_ns()
            self._trained.step(common["adapter"])
            self.spans.append(Span("compute", "optimizer", common["number"], begin, time.monotonic_ns()))
        return {}


class _Feed:
    """What stage 0 lets enter."""

    def __init__(self, driver: StageProcess, case: Case, steps: int, batch: Batch, turn: Turn) -> None:
        self._driver, self._case, self._steps, self._batch, self._turn = driver, case, steps, batch, turn
        turn.ended = [0.0] * case.adapters

    def run(self) -> None:
        """Run all steps, and close the pipeline."""
        if self._case.schedule == "lorapp":
            self._filled()
        else:
            self._flushed()
        self._driver.close()

    def _filled(self) -> None:
        """An adapter's next step enters when its last one has ended; others are under way meanwhile."""
        waiting = deque(range(self._case.adapters))
        first = [waiting.popleft() for _ in range(self._case.at_once or self._case.adapters)]
        under_way = deque((adapter, 0, self._enter(adapter, 0)) for adapter in first)
        while under_way:
            adapter, step, numbers = under_way.popleft()
            self._leave(adapter, step, numbers)
            if step + 1 < self._steps:
                under_way.append((adapter, step + 1, self._enter(adapter, step + 1)))
            elif waiting:
                under_way.append((waiting[0], 0, self._enter(waiting.popleft(), 0)))

    def _flushed(self) -> None:
        for adapter, step in rounds(self._case, self._steps):
            self._leave(adapter, step, self._enter(adapter, step))

    def _enter(self, adapter: int, step: int) -> list[int]:
        size, numbers = self._case.micro_batches, []
        for index in range(size):
            item = Item(adapter, step, index)
            self._turn.items.append(item)
            ends = len(self._turn.items) if index == size - 1 else 0
            ids = self._batch(item)
            common = {"adapter": adapter, "number": ends}
            position = RoundPosition(index, size)
            batch = ModuleCall({"given": ids}, {"ids": ids}, common)
            numbers.append(self._driver.start(batch, position=position))
        return numbers

    def _leave(self, adapter: int, step: int, numbers: list[int]) -> None:
        for index, number in enumerate(numbers):
            loss = float(self._driver.finish(number).report)
            self._turn.losses.append((Item(adapter, step, index), loss))
        self._turn.ended[adapter] = time.monotonic()


class SleepingStage(nn.Module):
    """Sleeps in forward and in backward, and hands its input on."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self._seconds = forward, backward
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor, **_: Any) -> Tensor:
        """`[n]` to `[n]`."""
        return _Sleep.apply(given * self.weight, *self._seconds)  # type: ignore[no-any-return]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.seconds)
        return dy, None, None


class NothingLearned:
    """Stands where adapters are updated."""

    def step(self, adapter: int) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""
