"""A pipeline over several processes, one stage each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ..cluster.world import World
from .actions import Schedule
from .driver import Driver
from .link import CREDIT_BYTES, Link
from .message import Message
from .order import order_of
from .port import WirePort
from .runner import Runner
from .stage import Hooks, LossFn, Stage, Worker, worker_of
from .trace import Trace
from .wire import Wire, connect

_TIMEOUT = 1800.0  # seconds to make the connections, and for NCCL to carry a tensor


@dataclass(frozen=True)
class Neighbour:
    """The connections to a neighbour and back."""

    peer: int  # the neighbour's rank
    out: Wire
    into: Wire
    # for each direction a group of the two, for tensors from GPU to GPU; None = through the host
    nccl: tuple[dist.ProcessGroup, dist.ProcessGroup] | tuple[None, None] = (None, None)


@dataclass(frozen=True)
class Neighbours:
    """A stage's neighbours, by `connect_neighbours`."""

    previous: Neighbour | None = None
    next: Neighbour | None = None
    # on rank 0 only, the first stages of the other pipelines, whose previous stage is rank 0
    replicas: tuple[Neighbour, ...] = ()

    def close(self) -> None:
        """Closes all connections."""
        for neighbour in (self.previous, self.next, *self.replicas):
            if neighbour is not None:
                neighbour.out.close()
                neighbour.into.close()


def connect_neighbours(world: World, *, replicas: int = 1, nccl: torch.device | None = None) -> Neighbours:
    """Connects the stages of a pipeline, and returns this stage's neighbours. Every process calls it once.

    Args:
        world: the processes of all pipelines.
        replicas: number of pipelines. Each consists of consecutive ranks.
        nccl: this stage's GPU, to send tensors from GPU to GPU. None = tensors go through the host, as they
            must if stages share a GPU.

    Raises:
        ValueError: the processes do not divide evenly into the pipelines.
        PeerError: a neighbour cannot be reached.
        RuntimeError: this process cannot listen.
    """
    if world.size % replicas:
        raise ValueError(f"replicas: {world.size} processes do not divide evenly into {replicas} pipelines")
    stages, me = world.size // replicas, world.rank
    heads = range(stages, world.size, stages)
    chain = [(rank, rank + 1) for rank in range(world.size - 1) if (rank + 1) % stages]
    pairs = [*chain, *((0, head) for head in heads)]
    wires = connect(world, [way for pair in pairs for way in (pair, pair[::-1])], _TIMEOUT)
    groups = {} if nccl is None else _nccl_groups(world, chain, nccl)

    def to(peer: int) -> Neighbour | None:
        if (me, peer) not in wires:
            return None
        there, back = (me, peer), (peer, me)
        own = (groups[there], groups[back]) if there in groups else (None, None)
        return Neighbour(peer, wires[there], wires[back], own)

    others = [to(head) for head in heads if me == 0]
    return Neighbours(
        to(0 if me in heads else me - 1),
        to(me + 1) if (me + 1) % stages else None,
        tuple(other for other in others if other is not None),
    )


def _nccl_groups(
    world: World, chain: list[tuple[int, int]], device: torch.device
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Creates a group per direction, in one order on all ranks, and sends a small message through each."""
    limit = timedelta(seconds=_TIMEOUT)
    store = dist.PrefixStore("groups", world.store)
    # new_group needs a default group; that connects at its first use, and nobody uses it
    dist.init_process_group("nccl", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for left, right in chain:
        for source, target in ((left, right), (right, left)):
            # every process has to make every group, even those that it is not in
            group = dist.new_group([left, right], timeout=limit, backend="nccl")
            if world.rank in (source, target):
                groups[source, target] = group
                message = torch.zeros(1, device=device)
                if world.rank == source:
                    dist.send(message, target, group=group)
                else:
                    dist.recv(message, source, group=group)
    return groups


class StageProcess(Driver):
    """One process's stage. The process of the first stage feeds the pipeline; the others call `serve`.

    Args:
        module: the stage: any `nn.Module`, or a `Worker`. The arguments that are not named here are those of
            `Pipeline`.
        index: the stage's number, from 0.
        count: number of stages, D.
        loss_fn: needed on the last stage only.
        device: where the stage computes.
        trace: number of spans to keep.
        name: names this stage in errors that the others see; default: by its index.
    """

    def __init__(
        self,
        module: nn.Module | Worker,
        index: int,
        count: int,
        neighbours: Neighbours,
        schedule: str | Schedule,
        loss_fn: LossFn | None = None,
        *,
        device: torch.device | str = "cpu",
        hooks: Hooks | None = None,
        in_flight: int | None = None,
        credit_bytes: int = CREDIT_BYTES,
        delay: float = 0.0,
        trace: int = 0,
        name: str = "",
    ) -> None:
        place, spans = torch.device(device), Trace(trace)
        stage = Stage(worker_of(module, loss_fn, hooks), index, count, spans)
        self.runner = runner = Runner(stage, order_of(schedule, index, count, in_flight), name)

        def link(other: Neighbour, deliver: Callable[[Message], None], keeps: bool = True) -> Link:
            out, into = WirePort(other.out, place, other.nccl[0]), WirePort(other.into, place, other.nccl[1])
            return Link(out, into, deliver, f"stage {other.peer}", credit_bytes, delay, spans, keeps=keeps)

        if neighbours.previous is not None:
            runner.before = link(neighbours.previous, runner.from_before)
        if neighbours.next is not None:
            runner.after = link(neighbours.next, runner.from_after)
        replicas = [link(other, runner.from_replica, keeps=False) for other in neighbours.replicas]
        chain = [found for found in (runner.before, runner.after) if found is not None]
        super().__init__(runner, [*chain, *replicas], replicas)

    def serve(self) -> None:
        """Works as a stage that is not the first, until the pipeline is closed.

        Raises:
            PipelineError: another stage failed.
            Exception: whatever the stage's module raised; the other stages are told.
        """
        self.runner.run()
        self.join()
