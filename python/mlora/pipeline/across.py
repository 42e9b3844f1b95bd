"""A pipeline over several processes, one stage each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .actions import Schedule
from .driver import Driver
from .link import CREDIT_BYTES, Link
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

        options: dict[str, Any] = {"credit_bytes": credit_bytes, "delay": delay, "trace": stage.trace}
        before, after = neighbours.from_previous, neighbours.from_next
        if before is not None and neighbours.to_previous is not None:
            out, into = _port(neighbours.to_previous, place), _port(before, place)
            self.runner.before = Link(out, into, self.runner.from_before, f"stage {before.peer}", **options)
        if after is not None and neighbours.to_next is not None:
            out, into = _port(neighbours.to_next, place), _port(after, place)
            self.runner.after = Link(out, into, self.runner.from_after, f"stage {after.peer}", **options)
        self.replicas = [
            Link(
                _port(to, place),
                _port(back, place),
                self.runner.from_replica,
                f"stage {to.peer}",
                keeps=False,
                **options,
            )
            for to, back in neighbours.replicas
        ]
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


def _port(way: Direction, device: torch.device) -> WirePort:
    return WirePort(way.wire, device, way.nccl)


class FirstStage(Driver):
    """Feeds a pipeline over several processes, from the process of its first stage.

    Args:
        own: this process's stage.
    """

    def __init__(self, own: StageProcess) -> None:
        super().__init__(own.runner, own.replicas)
        self._own = own

    def close(self) -> None:
        """Closes the pipeline as `Driver.close` does, and waits until the links have ended."""
        super().close()
        self._own.join()
