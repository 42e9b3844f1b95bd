"""A pipeline over several processes, one stage each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .actions import Schedule
from .driver import Driver
from .link import CREDIT_BYTES, Link
from .message import Message
from .neighbours import Direction, Neighbours
from .order import order_of
from .port import WirePort
from .runner import Runner
from .stage import Hooks, LossFn, Stage
from .trace import Trace


class StageProcess:
    """One process's stage, with its links to the neighbours' processes.

    Args:
        module: the stage; any `nn.Module`. See `Pipeline`.
        index: the stage's number, from 0.
        count: number of stages, D.
        neighbours: from `connect_neighbours`.
        schedule: as for `Pipeline`; the same on all stages.
        loss_fn: needed on the last stage only.
        device: where the stage computes.
        hooks: what it does besides running its module; default: nothing.
        in_flight: as for `Pipeline`.
        credit_bytes: as for `Pipeline`.
        delay: as for `Pipeline`.
        trace: number of spans to keep.
        name: names this stage in errors that the others see; default: by its index.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        neighbours: Neighbours,
        schedule: str | Schedule,
        loss_fn: LossFn | None,
        *,
        device: torch.device | str = "cpu",
        hooks: Hooks | None = None,
        in_flight: int | None = None,
        credit_bytes: int = CREDIT_BYTES,
        delay: float = 0.0,
        trace: int = 0,
        name: str = "",
    ) -> None:
        place = torch.device(device)
        stage = Stage(module, index, count, loss_fn, hooks, Trace(trace))
        self.runner = Runner(stage, order_of(schedule, index, count, in_flight), name)

        def link(to: Direction, back: Direction, deliver: Callable[[Message], None], keeps: bool) -> Link:
            out, into = (WirePort(way.wire, place, way.nccl) for way in (to, back))
            options: dict[str, Any] = {"credit_bytes": credit_bytes, "delay": delay, "trace": stage.trace}
            return Link(out, into, deliver, f"stage {to.peer}", keeps=keeps, **options)

        if neighbours.to_previous is not None and neighbours.from_previous is not None:
            there, back = neighbours.to_previous, neighbours.from_previous
            self.runner.before = link(there, back, self.runner.from_before, keeps=True)
        if neighbours.to_next is not None and neighbours.from_next is not None:
            there, back = neighbours.to_next, neighbours.from_next
            self.runner.after = link(there, back, self.runner.from_after, keeps=True)
        self.replicas = [link(*ways, self.runner.from_replica, keeps=False) for ways in neighbours.replicas]
        chain = [found for found in (self.runner.before, self.runner.after) if found is not None]
        self._links = [*chain, *self.replicas]
        for found in self._links:
            found.start()

    def serve(self) -> None:
        """Works as a stage that is not the first, until the pipeline is closed.

        Raises:
            PipelineError: another stage failed.
            Exception: whatever the stage's module raised; the other stages are told.
        """
        self.runner.run()
        self.join()

    def join(self) -> None:
        """Waits until the links have ended, as they do when the pipeline is closed."""
        for link in self._links:
            link.join()


class FirstStage(Driver):
    """Feeds a pipeline over several processes, from the process of its first stage, `own`."""

    def __init__(self, own: StageProcess) -> None:
        super().__init__(own.runner, own.replicas)
        self._own = own

    def close(self) -> None:
        """Closes the pipeline as `Driver.close` does, and waits until the links have ended."""
        super().close()
        self._own.join()
