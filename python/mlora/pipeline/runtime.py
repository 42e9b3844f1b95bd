"""A pipeline within one process: each stage after the first is a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from .actions import Schedule
from .driver import Driver
from .link import CREDIT_BYTES, Link
from .order import order_of
from .port import LocalPort
from .runner import PipelineError, Runner
from .stage import Hooks, LossFn, Stage, Worker, worker_of
from .trace import Span, Trace


class Pipeline(Driver):
    """Runs micro-batches through a model that is cut into stages.

    The first stage computes in the caller's thread, each other stage in its own. This pays if the stages have
    devices of their own. `StageProcess` runs one stage per process. With one stage all schedules are the
    same: one micro-batch after the other, each forward, loss and backward as one unit. Autocast holds for one
    thread only: enter it inside the modules.

    `lorapp` (mLoRA, section 4) runs whatever is ready and fills the pipeline with all submitted
    micro-batches. If the micro-batches are independent, there is no bubble.

    Args:
        stages: the modules, in order, each on its device; any `nn.Module`s. The first is called with a
            micro-batch's inputs, each other with the output of the one before: one tensor or several. Or a
            `Worker` for each stage, which knows its loss.
        schedule: `lorapp`, `1f1b`, `gpipe`, or lists of actions for rounds of one size.
        loss_fn: `(output of the last stage, targets) -> (scalar to differentiate, report)`.
        hooks: one per stage, for what it does besides running its module; default: nothing.
        in_flight: for `lorapp`, the most micro-batches between their first forward and their last backward;
            None = any number.
        credit_bytes: for each neighbour, the bytes of tensors that may be on their way to a stage or wait
            there.
        delay: seconds to hold each message back, to imitate a link's latency in measurements.
        trace: number of spans to keep for each stage.

    Raises:
        ValueError: there is no stage, another number of hooks than of stages, or no such schedule.

    Example:
        >>> pipeline = Pipeline([first, second], "1f1b", lambda y, t: ((y - t).square().mean(), None))
        >>> for x, t in micro_batches:
        ...     pipeline.submit({"input": x}, t)
        >>> pipeline.step()
        >>> pipeline.close()

        A custom schedule, for rounds of two micro-batches:

        >>> lists = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
        >>> schedule = [[Action.parse(text) for text in stage.split()] for stage in lists]
    """

    def __init__(
        self,
        stages: Sequence[nn.Module | Worker],
        schedule: str | Schedule,
        loss_fn: LossFn | None = None,
        *,
        hooks: Sequence[Hooks] | None = None,
        in_flight: int | None = None,
        credit_bytes: int = CREDIT_BYTES,
        delay: float = 0.0,
        trace: int = 0,
    ) -> None:
        count = len(stages)
        if not count:
            raise ValueError("stages: expected at least one, got none")
        if hooks is not None and len(hooks) != count:
            raise ValueError(f"hooks: expected one per stage ({count}), got {len(hooks)}")
        self._runners = [
            Runner(
                Stage(worker_of(stage, loss_fn, hooks[index] if hooks else None), index, count, Trace(trace)),
                order_of(schedule, index, count, in_flight),
            )
            for index, stage in enumerate(stages)
        ]
        links = []
        for left, right in pairwise(self._runners):
            down, up = (LocalPort(runner.stage.worker.device) for runner in (right, left))
            before, after = (f"stage {runner.stage.index}" for runner in (left, right))
            left.after = Link(down, up, left.from_after, after, credit_bytes, delay, left.stage.trace)
            right.before = Link(up, down, right.from_before, before, credit_bytes, delay, right.stage.trace)
            links += [left.after, right.before]
        super().__init__(self._runners[0], links)
        self._threads = [
            threading.Thread(target=_serve, args=[runner], name=f"stage {index}", daemon=True)
            for index, runner in enumerate(self._runners[1:], 1)
        ]
        for thread in self._threads:
            thread.start()

    def spans(self) -> list[list[Span]]:
        """Returns the spans of each stage; empty without `trace`."""
        return [runner.stage.trace.spans() for runner in self._runners]

    def close(self) -> None:
        """Closes the pipeline as `Driver.close` does, and waits for its threads to end."""
        super().close()
        for thread in self._threads:
            thread.join()

    def _ended(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raises a PipelineError whose cause is the exception of the stage that failed."""
        super()._ended(kind, error, trace)
        if isinstance(error, PipelineError):
            causes = [runner.failure for runner in self._runners if runner.failure is not None]
            cause = next((found for found in causes if not isinstance(found, PipelineError)), None)
            raise PipelineError(str(error)) from cause


def _serve(runner: Runner) -> None:
    device = runner.stage.worker.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    runner.serve()
