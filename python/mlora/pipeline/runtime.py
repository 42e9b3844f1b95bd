"""The runtime: takes micro-batches, runs them over the stages, gives back the reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .stage import LossFn, MicroBatch, Stage

SCHEDULES = ("lorapp", "1f1b", "gpipe")


class Pipeline:
    """Runs micro-batches over a model cut into stages.

    With one stage every schedule is the same: a micro-batch after the other, each forward, loss and backward
    as one unit.

    Args:
        stages: the modules, in order; any `nn.Module`s. The first is called with a micro-batch's inputs.
        schedule: `lorapp`, `1f1b` or `gpipe`.
        loss_fn: `(output of the last stage, targets) -> (scalar to differentiate, report)`.

    Raises:
        ValueError: if there is not exactly one stage, or no such schedule.

    Example:
        >>> pipeline = Pipeline([model], "lorapp", lambda y, t: ((y - t).square().mean(), None))
        >>> pipeline.submit({"input": x}, t)
        >>> pipeline.step()
    """

    def __init__(self, stages: Sequence[nn.Module], schedule: str, loss_fn: LossFn) -> None:
        if len(stages) != 1:
            raise ValueError(f"stages: this version runs pipelines of 1 stage, got {len(stages)}")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self._stage = Stage(stages[0], loss_fn)
        self._waiting: list[MicroBatch] = []
        self._closed = False

    def submit(self, inputs: Mapping[str, Any], targets: Any, *, train: bool = True) -> None:
        """Queue a micro-batch.

        Args:
            inputs: keyword arguments of the first stage.
            targets: handed to the loss function.
            train: whether to run backward, or only forward and loss without gradients.

        Raises:
            RuntimeError: after `close`.
        """
        if self._closed:
            raise RuntimeError("the pipeline is closed")
        self._waiting.append(MicroBatch(inputs, targets, train))

    def step(self) -> list[Any]:
        """Run every queued micro-batch to its end.

        Returns:
            The loss function's reports, in the order of submission.

        Raises:
            RuntimeError: after `close`.
        """
        if self._closed:
            raise RuntimeError("the pipeline is closed")
        waiting, self._waiting = self._waiting, []
        return [self._stage.run(batch) for batch in waiting]

    def close(self) -> None:
        """Drop what is queued and refuse further work."""
        self._waiting.clear()
        self._closed = True
