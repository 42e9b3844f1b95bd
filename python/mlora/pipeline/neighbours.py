"""The links between the processes of neighbouring stages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..cluster.world import World
from .wire import Wire, connect


@dataclass(frozen=True)
class Direction:
    """One direction between two neighbours.

    Attributes:
        peer: the neighbour's rank.
        wire: carries tensors in host memory.
        nccl: a group of the two, for tensors from GPU to GPU; None = these go through the host.
    """

    peer: int
    wire: Wire
    nccl: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Neighbours:
    """A stage's links to its neighbours; None where there is no neighbour.

    Attributes:
        from_previous: receives what the previous stage sends forward.
        to_next: sends forward to the next stage.
        from_next: receives what the next stage sends back.
        to_previous: sends back to the previous stage.
        replicas: on rank 0 only, the links to and from the first stage of each other pipeline. For these
            stages, rank 0 is the previous one.
    """

    from_previous: Direction | None = None
    to_next: Direction | None = None
    from_next: Direction | None = None
    to_previous: Direction | None = None
    replicas: tuple[tuple[Direction, Direction], ...] = ()

    def close(self) -> None:
        """Closes all connections."""
        ways = [self.from_previous, self.to_next, self.from_next, self.to_previous]
        for way in (*ways, *(way for pair in self.replicas for way in pair)):
            if way is not None:
                way.wire.close()


def connect_neighbours(
    world: World, *, replicas: int = 1, nccl: torch.device | None = None, timeout: float = 1800.0
) -> Neighbours:
    """Connects the stages of a pipeline. Every process calls it once.

    Args:
        world: the processes of all pipelines.
        replicas: number of pipelines. Each consists of consecutive ranks.
        nccl: this stage's GPU, to send tensors from GPU to GPU. None = tensors go through the host, as they
            must if stages share a GPU.
        timeout: seconds to make the connections, and for NCCL to carry a tensor.

    Returns:
        This stage's links.

    Raises:
        ValueError: the processes do not divide evenly into the pipelines.
        PeerError: a neighbour cannot be reached.
        RuntimeError: this process cannot listen.
    """
    if world.size % replicas:
        raise ValueError(f"replicas: {world.size} processes do not divide evenly into {replicas} pipelines")
    stages = world.size // replicas
    heads = range(stages, world.size, stages)
    chain = [(rank, rank + 1) for rank in range(world.size - 1) if (rank + 1) % stages]
    pairs = [*chain, *((0, head) for head in heads)]
    wires = connect(world, [way for pair in pairs for way in (pair, pair[::-1])], timeout)
    groups = {} if nccl is None else _nccl_groups(world, chain, nccl, timeout)
    me = world.rank
    links = {
        (source, target): Direction(target if me == source else source, wire, groups.get((source, target)))
        for (source, target), wire in wires.items()
    }
    before, after = (0 if me in heads else me - 1), (me + 1 if (me + 1) % stages else -1)
    return Neighbours(
        from_previous=links.get((before, me)),
        to_next=links.get((me, after)),
        from_next=links.get((after, me)),
        to_previous=links.get((me, before)),
        replicas=tuple((links[0, head], links[head, 0]) for head in heads if me == 0),
    )


def _nccl_groups(
    world: World, chain: list[tuple[int, int]], device: torch.device, timeout: float
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Creates a group per direction, in one order on all ranks, and sends a small message through each."""
    limit = timedelta(seconds=timeout)
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
