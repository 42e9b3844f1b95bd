"""What the lines of ``metrics.jsonl`` say: curves of each adapter, and memory over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlora.report.curves import Curve

_NO_CURVE = ("adapter", "step", "tokens", "seconds", "peak_memory_bytes", "skipped", "eval_tokens", "best")


def _curves() -> dict[str, Curve]:
    return defaultdict(Curve)


@dataclass
class History:
    """What a run measured.

    Args:
        curves: of each adapter, by the key of ``metrics.jsonl``; over its optimizer steps.
        memory: peak memory in bytes over the seconds of training.
        seconds: of training, up to the last line.
        steps: optimizer steps of all adapters.
        tokens: trained tokens of each adapter.
        time: seconds of training of each adapter.
        skipped: steps of each adapter that a loss scaler skipped.
    """

    curves: dict[str, dict[str, Curve]] = field(default_factory=lambda: defaultdict(_curves))
    memory: Curve = field(default_factory=Curve)
    seconds: float = 0.0
    steps: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    time: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    skipped: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def read_history(records: Iterable[Mapping[str, Any]]) -> History:
    """Reads lines of metrics, one at a time.

    A line says how long ago its adapter's previous step was, not when it was. So time is counted along the
    lines, which are in the order of time: a step ends no earlier than the line before it. The time between
    two parts of a resumed run is not counted.
    """
    history = History()
    ended: dict[str, float] = {}
    for record in records:
        name, step = record["adapter"], record["step"]
        own = history.curves[name]
        for key, value in record.items():
            if key not in _NO_CURVE and isinstance(value, int | float):
                own[key].add(step, value)
        if "loss" not in record:
            continue
        history.steps += 1
        history.tokens[name] += record.get("tokens", 0)
        history.time[name] += record.get("seconds", 0.0)
        history.skipped[name] += bool(record.get("skipped"))
        history.seconds = max(history.seconds, ended.get(name, 0.0) + record.get("seconds", 0.0))
        ended[name] = history.seconds
        if "peak_memory_bytes" in record:
            history.memory.add(history.seconds, record["peak_memory_bytes"])
    return history
