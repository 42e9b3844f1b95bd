"""A pipeline over processes, one stage each."""

from __future__ import annotations

import torch
from torch import nn

from .actions import Schedule
from .driver import Driver
from .groups import Link as Groups
from .groups import Neighbours
from .link import CREDIT_BYTES, Link
from .order import order_of
from .port import GroupPort
from .runner import Runner
from .stage import Hooks, LossFn, Stage
from .trace import Trace


class Member:
    """One process's stage, with its links to the neighbours' processes.

    Args:
        module: the stage; any `nn.Module`. See `Pipeline`.
        rank: its index.
        size: D.
        neighbours: of `neighbour_groups`.
        schedule: as for `Pipeline`; the same on all stages.
        loss_fn: of the last stage.
        device: where the stage computes.
        hooks: what it does beside.
        in_flight: as for `Pipeline`.
        credit_bytes: as for `Pipeline`.
        delay: as for `Pipeline`.
        trace: spans to keep.
    """

    def __init__(
        self,
        module: nn.Module,
        rank: int,
        size: int,
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
    ) -> None:
        self.trace = Trace(trace)
        place = torch.device(device)
        order = order_of(schedule, rank, size, in_flight)
        self.runner = Runner(Stage(module, rank, size, loss_fn, hooks), order, self.trace)

        def link(out: Groups | None, into: Groups | None, before: bool) -> Link | None:
            if out is None or into is None:
                return None
            deliver = self.runner.from_before if before else self.runner.from_after
            ports = [
                GroupPort(way.headers, way.peer, place, None if way.payload is way.headers else way.payload)
                for way in (out, into)
            ]
            return Link(
                *ports,
                deliver,
                f"stage {out.peer}",
                credit_bytes=credit_bytes,
                delay=delay,
                trace=self.trace,
            )

        self.runner.before = link(neighbours.to_previous, neighbours.from_previous, True)
        self.runner.after = link(neighbours.to_next, neighbours.from_next, False)
        self._links = [found for found in (self.runner.before, self.runner.after) if found is not None]
        for found in self._links:
            found.start()

    def serve(self) -> None:
        """Work as a stage that is not the first, until the pipeline is closed.

        Raises:
            PipelineError: if another stage failed.
            Exception: whatever the stage's module raised; the other stages are told.
        """
        self.runner.run()
        self.join()

    def join(self) -> None:
        """Wait until the links have ended, as they do when the pipeline is closed."""
        for link in self._links:
            link.join()


class FirstStage(Driver):
    """Feeds a pipeline over processes from that of its first stage.

    Args:
        member: this process's stage.
    """

    def __init__(self, member: Member) -> None:
        super().__init__(member.runner)
        self._member = member

    def close(self) -> None:
        """See `Driver.close`."""
        super().close()
        self._member.join()
