"""The cut that processes agree on: by the slowest of each stage, within the memory that is free."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mlora.config.sections import PipelineConfig
from mlora.engine.stage_group import StageOptions
from mlora.planning import measured_cut as module
from mlora.planning.measured_cut import held_by, measured_cut
from mlora.planning.partition import Cost, Table

OPTIONS = StageOptions(torch.device("cpu"), torch.float32)


def config(adapters: int = 4, **pipeline: Any) -> Any:
    return SimpleNamespace(
        base_model="", pipeline=PipelineConfig(**pipeline), at_once=adapters, output_dir=""
    )


def table(seconds: float, weight_bytes: int = 100, activation_bytes: int = 10) -> Table:
    part = Cost(0.0, 0)
    return Table(part, (Cost(seconds, weight_bytes, activation_bytes),) * 6, part)


def cut(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    tables: list[Table],
    memory: list[tuple[str, str, int | None]],
) -> list[int]:
    """The cut of the first of some processes that have measured these tables."""
    found = [
        {"kind": str(rank), "table": asdict(table), "memory": list(place)}
        for rank, (table, place) in enumerate(zip(tables, memory, strict=True))
    ]
    monkeypatch.setattr(module, "profile_base", lambda *arguments, **options: tables[0])
    world: Any = SimpleNamespace(gather=lambda *_: found, process=SimpleNamespace(host="here"))
    return measured_cut(config, world, OPTIONS, [8])


def test_the_slowest_of_each_stage_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[tuple[str, str, int | None]] = [("here", "cpu", None)] * 4
    both = config(stages=2, replicas=2)
    assert cut(monkeypatch, both, [table(1.0), table(1.0), table(1.0), table(1.0)], free) == [3, 3]
    assert cut(monkeypatch, both, [table(1.0), table(1.0), table(2.0), table(1.0)], free) == [2, 4]


def test_memory_moves_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    two = config(stages=2)  # 4 and 1 micro-batches at once: 140 and 110 bytes a block
    alike = [table(1.0), table(1.0)]
    assert held_by(two) == [4, 1]
    assert cut(monkeypatch, two, alike, [("a", "cuda:0", 10_000), ("b", "cuda:0", 10_000)]) == [3, 3]
    assert cut(monkeypatch, two, alike, [("a", "cuda:0", 300), ("b", "cuda:0", 10_000)]) == [2, 4]
    shared = [("a", "cpu", 2 * 450)] * 2
    assert cut(monkeypatch, two, alike, [*shared]) == [3, 3]
    expected = r"stage \d with blocks \d to \d needs .*; name pipeline.partition to try one all the same"
    with pytest.raises(ValueError, match=expected):
        cut(monkeypatch, two, alike, [("a", "cpu", 2 * 300)] * 2)


@pytest.mark.parametrize(
    ("pipeline", "adapters", "expected"),
    [
        ({"stages": 4}, 2, [2, 2, 2, 1]),
        ({"stages": 3, "replicas": 2}, 4, [2, 2, 1]),
        ({"stages": 3, "schedule": "1f1b", "micro_batches": 8}, 5, [3, 2, 1]),
        ({"stages": 3, "schedule": "gpipe", "micro_batches": 8}, 5, [8, 8, 8]),
    ],
)
def test_micro_batches_that_a_stage_holds(pipeline: Any, adapters: int, expected: list[int]) -> None:
    assert held_by(config(adapters, **pipeline)) == expected
