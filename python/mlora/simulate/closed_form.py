"""The bubble ratio of the steady window: a lower bound in closed form, and where it is reached.

D stages, L streams, N micro-batches per step, T = forward + backward of a micro-batch on a stage, c = latency
of a hop between neighbours, W = the most micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from .workload import Workload


def least_bubble(
    seconds: Sequence[float],
    hops: Sequence[float],
    adapters: int,
    micro_batches: int = 1,
    *,
    optimizer: Sequence[float] | None = None,
    in_flight: int | None = None,
) -> float:
    """Returns a lower bound of the bubble ratio of an endless run; see `is_reached`.

    In a round, each of L adapters makes a step of N micro-batches. A round takes at least as long as

    - the work of a stage in it,
    - one step: the way to a stage and back, and the stage's N micro-batches,
    - `L N / W` times the way through all stages, if at most W micro-batches are in flight.

    For equal stages without optimizer times and W it is `max(0, 1 - L N / (D + N - 1 + 2 (D - 1) c / T))`.
    With c = 0 and N = 1 this is `max(0, (D - L) / D)` (mLoRA, section 4). With c = 0 and L = 1 it is the
    bubble of GPipe and 1F1B, `(D - 1) / (N + D - 1)` (GPipe, section 2.3).

    Args:
        seconds: T of each stage.
        hops: for each pair of neighbours, seconds on the way to the next stage and back.
        adapters: L; 1 for `gpipe` and `1f1b`.
        micro_batches: N.
        optimizer: for each stage, seconds of an adapter's optimizer step.
        in_flight: W.
    """
    steps = optimizer or [0.0] * len(seconds)
    works = [micro_batches * each + step for each, step in zip(seconds, steps, strict=True)]
    way, least = 0.0, adapters * max(works)
    for each, step, work, hop in zip(seconds, steps, works, [*hops, 0.0], strict=True):
        least = max(least, way + work)
        way += each + step + hop
    if in_flight is not None:
        least = max(least, adapters * micro_batches * (sum(seconds) + sum(hops)) / in_flight)
    return max(0.0, 1.0 - adapters * sum(works) / len(seconds) / least) if least else 0.0


def is_reached(workload: Workload) -> bool:
    """Whether a long simulated run is known to reach `least_bubble`, which otherwise is only a lower bound.

    Known for equal stages without optimizer times and equal streams, if links take no time and W is at least
    L N; and for `lorapp` if all links are alike, N = 1 and W = L <= D. `gpipe` and `1f1b` need one stream,
    and nothing is known of lists of actions. A finite run's bubble is larger because of its beginning; the
    difference shrinks with the number of steps.
    """
    first, depth, count = workload.streams[0], len(workload.stages), len(workload.streams)
    alike = set(workload.streams) == {first} and len(set(first.rows)) == 1
    if not alike or len(set(workload.stages)) > 1 or workload.stages[0].optimizer:
        return False
    links = [*workload.links(workload.forward), *workload.links(workload.backward)]
    spent = {(link.latency, link.seconds(first.rows[0])) for link in links}
    if workload.schedule != "lorapp":
        return isinstance(workload.schedule, str) and count == 1 and spent <= {(0.0, 0.0)}
    most = workload.in_flight
    if spent <= {(0.0, 0.0)}:
        return most is None or most >= count * first.micro_batches
    return len(spent) == 1 and first.micro_batches == 1 and most == count <= depth
