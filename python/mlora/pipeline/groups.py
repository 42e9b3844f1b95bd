"""The process groups between neighbouring stages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .world import World


@dataclass(frozen=True)
class Link:
    """One direction between two neighbours: two groups of the same two processes.

    Attributes:
        peer: the neighbour's rank.
        headers: a gloo group, for small messages of the CPU.
        payload: the group for tensors; the same one where these lie on the CPU.
    """

    peer: int
    headers: dist.ProcessGroup
    payload: dist.ProcessGroup


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

    from_previous: Link | None = None
    to_next: Link | None = None
    from_next: Link | None = None
    to_previous: Link | None = None
    replicas: tuple[tuple[Link, Link], ...] = ()


def neighbour_groups(
    world: World,
    backend: str = "gloo",
    *,
    replicas: int = 1,
    device: torch.device | None = None,
    timeout: float = 1800.0,
) -> Neighbours:
    """Make the groups of a pipeline, in the order of the stages, and pass one small message through each.

    Every process calls it once; `torch.distributed.destroy_process_group` undoes it.

    Args:
        world: the pipeline's processes.
        backend: carries the payloads: ``gloo``, or ``nccl`` between GPUs.
        replicas: pipelines that the processes form, each a run of ranks.
        device: where this stage's payloads lie; by default the CPU for gloo, and for NCCL the GPU of the
            world's local rank.
        timeout: seconds after which an operation on a group fails.

    Returns:
        This stage's links.

    Raises:
        ValueError: no such backend, or the processes do not come out even.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend: expected gloo or nccl, got {backend!r}")
    if world.size % replicas:
        raise ValueError(f"replicas: {world.size} processes do not form {replicas} pipelines of one length")
    if device is None:
        device = torch.device("cuda", world.local_rank) if backend == "nccl" else torch.device("cpu")
    limit = timedelta(seconds=timeout)
    store = dist.PrefixStore("groups", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    links: dict[tuple[int, int], Link] = {}
    stages = world.size // replicas
    heads = range(stages, world.size, stages)
    chain = [(rank, rank + 1) for rank in range(world.size - 1) if (rank + 1) % stages]
    for left, right in [*chain, *((0, head) for head in heads)]:
        for source, target in ((left, right), (right, left)):
            # a process that is in neither still counts along
            headers = dist.new_group([left, right], timeout=limit, backend="gloo")
            payload = headers
            if backend != "gloo" and right not in heads:
                payload = dist.new_group([left, right], timeout=limit, backend=backend)
            if world.rank in (source, target):
                link = Link(target if world.rank == source else source, headers, payload)
                links[source, target] = link
                _warm_up(link, sends=world.rank == source, device=device)
    me = world.rank
    before, after = (0 if me in heads else me - 1), (me + 1 if (me + 1) % stages else -1)
    return Neighbours(
        from_previous=links.get((before, me)),
        to_next=links.get((me, after)),
        from_next=links.get((after, me)),
        to_previous=links.get((me, before)),
        replicas=tuple((links[0, head], links[head, 0]) for head in heads if me == 0),
    )


def _warm_up(link: Link, *, sends: bool, device: torch.device) -> None:
    places = {id(link.headers): (link.headers, torch.device("cpu"))}
    places[id(link.payload)] = (link.payload, device)
    for group, place in places.values():
        message = torch.zeros(1, device=place)
        if sends:
            dist.send(message, dst=link.peer, group=group)
        else:
            dist.recv(message, src=link.peer, group=group)
