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
        wire: for what lies in the host's memory.
        nccl: a group of the two, for tensors that go from GPU to GPU; None = these go through the host.
    """

    peer: int
    wire: Wire
    nccl: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Neighbours:
    """A stage's links; none where there is no neighbour.

    Attributes:
        from_previous: brings what is forwarded.
        to_next: takes what is forwarded.
        from_next: brings what comes back.
        to_previous: takes what goes back.
        replicas: to and from the first stages of the other pipelines, at the first process of all. Each of
            those has that process as its previous one.
    """

    from_previous: Direction | None = None
    to_next: Direction | None = None
    from_next: Direction | None = None
    to_previous: Direction | None = None
    replicas: tuple[tuple[Direction, Direction], ...] = ()

    def close(self) -> None:
        """End the connections."""
        ways = [self.from_previous, self.to_next, self.from_next, self.to_previous]
        for way in (*ways, *(way for pair in self.replicas for way in pair)):
            if way is not None:
                way.wire.close()


def connect_neighbours(
    world: World, *, replicas: int = 1, nccl: torch.device | None = None, timeout: float = 1800.0
) -> Neighbours:
    """Connect the stages of a pipeline; every process calls it once.

    Args:
        world: the pipeline's processes.
        replicas: pipelines that the processes form, each a run of ranks.
        nccl: this stage's GPU where tensors shall go from GPU to GPU. None = they go through the host, as
            they must where stages share a GPU.
        timeout: seconds in which the connections have to be made, and in which NCCL has to carry a tensor.

    Returns:
        This stage's links.

    Raises:
        ValueError: the processes do not come out even.
        PeerError: a neighbour cannot be reached.
    """
    if world.size % replicas:
        raise ValueError(f"replicas: {world.size} processes do not form {replicas} pipelines of one length")
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
    """A group per direction, made in the same order everywhere; one small message goes through each."""
    limit = timedelta(seconds=timeout)
    store = dist.PrefixStore("groups", world.store)
    # the default group is none of these; it connects when it is first used, which nobody does
    dist.init_process_group("nccl", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    for left, right in chain:
        for source, target in ((left, right), (right, left)):
            # a process that is in neither still counts along
            group = dist.new_group([left, right], timeout=limit, backend="nccl")
            if world.rank in (source, target):
                groups[source, target] = group
                message = torch.zeros(1, device=device)
                if world.rank == source:
                    dist.send(message, target, group=group)
                else:
                    dist.recv(message, source, group=group)
    return groups
