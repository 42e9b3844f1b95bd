"""What is learned of micro-batches that have passed."""

from types import SimpleNamespace
from typing import Any

import pytest
from mlora.roster.micro_batches import MicroBatches
from mlora.scheduler import Admission, Room


@pytest.mark.parametrize("idle", [True, False])
def test_what_processes_keep_is_read_when_nothing_is_under_way(idle: bool) -> None:
    """Else it counts micro-batches that a stage still holds."""
    told: list[Any] = []
    memory = SimpleNamespace(
        room=lambda: Room((100, 100), (2, 1)), took=lambda *arguments: told.append(arguments)
    )
    roster: Any = SimpleNamespace(
        memory=memory, admission=Admission({"a": 0}, 2, (20.0, 30.0)), admitted=lambda: ["a"]
    )
    engine: Any = SimpleNamespace(idle=idle, memory_after=[70, 60], peak_memory=90)
    MicroBatches(roster, engine).passed([])
    assert told == [(["a"], [40.0, 30.0], 90, [70, 60] if idle else ())]
