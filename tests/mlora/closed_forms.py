"""Bubble ratios of the steady window in closed form, for equal stages: the oracle of the simulator.

D stages, L adapters, N micro-batches of each step, T = forward + backward of a micro-batch on a stage, c the
latency of a hop between neighbours.
"""

import math
from collections.abc import Sequence


def lorapp_bubble(stages: int, adapters: int, micro_batches: int = 1, latency: float = 0.0) -> float:
    """LoRAPP: `max(0, 1 - L N / (D + N - 1 + 2 (D - 1) c / T))`.

    A step of one adapter takes at least `(D + N - 1) T + 2 (D - 1) c`, in which every stage works `L N T`.
    With c = 0 this is `max((D - 1 + N - L N) / (D + N - 1), 0)`, and with N = 1 `max((D - L) / D, 0)` (mLoRA,
    section 4). Simulated, it is reached for c = 0, and with N = 1 and as many micro-batches in flight as
    adapters for L <= D. Between there and `lorapp_adapters` it is a lower bound only.

    Args:
        stages: D.
        adapters: L.
        micro_batches: N.
        latency: c / T.
    """
    period = stages + micro_batches - 1 + 2 * (stages - 1) * latency
    return max(0.0, 1.0 - adapters * micro_batches / period)


def lorapp_adapters(stages: int, latency: float = 0.0) -> int:
    """Adapters with one micro-batch each that leave no bubble: `D + (D - 1) ceil(2 c / T)`.

    A saturated stage repeats itself every T, so that a hop and its way back take a whole number of T more.

    Args:
        stages: D.
        latency: c / T.
    """
    return stages + (stages - 1) * math.ceil(2 * latency)


def flushed_bubble(stages: int, micro_batches: int) -> float:
    """GPipe and 1F1B over a round of N micro-batches: `(D - 1) / (N + D - 1)` (GPipe, section 2.3).

    Args:
        stages: D.
        micro_batches: N.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def slowest_stage_bubble(seconds: Sequence[float]) -> float:
    """The least bubble ratio of unequal stages: `1 - mean(T_s) / max(T_s)`, as the slowest one never waits.

    Args:
        seconds: T of each stage.
    """
    return 1.0 - sum(seconds) / len(seconds) / max(seconds) if max(seconds) else 0.0
