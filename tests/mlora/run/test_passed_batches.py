"""What is learned of micro-batches that have passed."""

from types import SimpleNamespace
from typing import Any

import pytest
from mlora.memory.room import Room
from mlora.run.reporter import Reporter
from mlora.run.task_table import TaskTable
from mlora.scheduler import Admission
from mlora.store.run_folder import RunFolder


def table_of(engine: Any, memory: Any, admission: Admission) -> TaskTable:
    tasks: Any = [SimpleNamespace(name=name) for name in admission.slots]
    builder: Any = None
    table = TaskTable(engine, builder, tasks, {}, RunFolder("nowhere"), Reporter(), memory)
    table.admission = admission
    return table


@pytest.mark.parametrize("idle", [True, False])
def test_what_processes_keep_is_read_when_nothing_is_under_way(idle: bool) -> None:
    """Else it counts micro-batches that a stage still holds."""
    told: list[Any] = []
    memory = SimpleNamespace(
        room=lambda: Room((100, 100), (2, 1)), took=lambda *arguments: told.append(arguments)
    )
    engine = SimpleNamespace(idle=idle, memory_after=[70, 60], peak_memory=90, adapters=["a"])
    table_of(engine, memory, Admission({"a": 0, "b": 1}, 2, (20.0, 30.0))).passed([])
    assert told == [(["a"], [40.0, 30.0], 90, [70, 60] if idle else ())]


@pytest.mark.parametrize(("budget", "foreseen"), [(-500.0, 400.0), (600.0, 600.0)])
def test_a_task_that_goes_on_beyond_the_limit_is_foreseen_to(budget: float, foreseen: float) -> None:
    """Else each of its peaks would be kept in reserve, which leaves the less for the next one."""
    told: list[Any] = []
    asked: list[Any] = []
    adopted = SimpleNamespace(activations=lambda *arguments: asked.append(arguments) or [400.0])
    memory = SimpleNamespace(
        room=lambda: Room((100,), (3,)),
        took=lambda tasks, foreseen, *_: told.append(foreseen),
        estimate=SimpleNamespace(as_adopted=adopted),
        adapters=SimpleNamespace(largest=lambda name: [7, 7]),
    )
    engine = SimpleNamespace(idle=False, peak_memory=900, adapters=["a"])
    table = table_of(engine, memory, Admission({"a": 0}, 1, (budget,)))
    table.passed([])
    assert asked == [({"a": [7, 7]}, ["a"])]
    assert told == [[foreseen]], "one slot is in use, whatever else a stage could hold"
