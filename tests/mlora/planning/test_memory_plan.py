"""What a run will need of memory, told before it runs."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from mlora.config.config_file import resolve_config
from mlora.config.run_config import RunConfig
from mlora.engine.dry_run import dry_stages
from mlora.engine.stage_group import StageOptions
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.room import RESERVED, MemoryLimit
from mlora.model.base_info import BaseInfo
from mlora.planning.memory_plan import MemoryPlan, TaskPlan, memory_plan
from mlora.planning.task_memory import know_task
from mlora.tasks.task import Task, TaskBuilder
from tiny_run import run_data, write_run

MIB = 2**20
BASE = 300 * MIB
OPTIONS = StageOptions(torch.device("cpu"), torch.float32)


def prepared(
    folder: Path, base: Path, limit: int, **first: Any
) -> tuple[RunConfig, list[Task], AdapterMemory]:
    data = run_data(base, folder) | {"scheduler": {"memory_limit": limit}}
    data["adapters"][0] |= first
    config = resolve_config(data, folder=folder)
    builder = TaskBuilder(config, BaseInfo(config.base_model, config.base_folder))
    tasks = [builder.build(adapter) for adapter in config.adapters]
    return config, tasks, AdapterMemory(dry_stages(config.base_model, OPTIONS, config.pipeline.stages))


def needed(folder: Path, base: Path) -> list[int]:
    """What each task needs beside the base model."""
    config, tasks, memory = prepared(folder, base, 1 << 40)
    plan = memory_plan(config, tasks, memory, [BASE])
    assert [task.verdict for task in plan.tasks] == ["runs", "runs"]
    return [task.peak[0] for task in plan.tasks]


@pytest.mark.parametrize(("room", "verdicts"), [(2.5, ["runs", "runs"]), (1.1, ["runs", "waits"])])
def test_who_runs_and_who_waits(tiny_base: Path, tmp_path: Path, room: float, verdicts: list[str]) -> None:
    most = max(needed(tmp_path, tiny_base))
    config, tasks, memory = prepared(tmp_path, tiny_base, BASE + RESERVED + int(room * most))
    plan = memory_plan(config, tasks, memory, [BASE])
    assert [task.verdict for task in plan.tasks] == verdicts
    assert plan.lines()[0].endswith(f"{verdicts.count('runs')} run together first")


def test_what_is_said_of_samples_of_a_sweep() -> None:
    verdicts = {"a": "runs", "b": "runs", "c": "waits"}
    tasks = tuple(TaskPlan(name, 0, (2 * MIB,), verdict) for name, verdict in verdicts.items())
    plan = MemoryPlan((MIB,), tasks, 5 * MIB, places=1)
    assert plan.lines() == ["memory_limit 5 MiB: of 3 sampled trials 1 run together first", "1 wait: c"]
    assert replace(plan, limit=None).lines() == ["no scheduler.memory_limit: trials run 1 at once"]
    never = tuple(replace(task, verdict="is too large") for task in tasks)
    assert replace(plan, tasks=never, limit=700, places=None).lines() == ["memory_limit 700 bytes: none runs"]


def test_a_higher_priority_runs_first(tiny_base: Path, tmp_path: Path) -> None:
    most = max(needed(tmp_path, tiny_base))
    config, tasks, memory = prepared(tmp_path, tiny_base, BASE + RESERVED + int(1.1 * most), priority=-1)
    plan = memory_plan(config, tasks, memory, [BASE])
    assert [task.verdict for task in plan.tasks] == ["waits", "runs"]


def test_who_never_fits_is_told_of_the_largest_batch_that_would(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch: dict[str, Any] = {"per_device_train_batch_size": 400, "shuffle": False}  # wraps around the end
    config, tasks, memory = prepared(tmp_path, tiny_base, 1 << 40, **batch)
    know_task(memory, tasks[0])
    states = memory.admitted("first")[0]
    few, many = (memory.size("first", tasks[0].next_lengths()[:count]) for count in (100, 400))
    limit = BASE + RESERVED + states + int((few + many) / 2)
    config, tasks, memory = prepared(tmp_path, tiny_base, limit, **batch)
    plan = memory_plan(config, tasks, memory, [BASE])
    assert [task.verdict for task in plan.tasks] == [
        "waits",
        "runs",
    ]  # it may fit once less is kept in reserve
    monkeypatch.setattr("mlora.memory.room._LEAST_RESERVED", RESERVED)
    plan = memory_plan(config, tasks, memory, [BASE])
    (never,) = plan.never
    assert never.name == "first"
    (lower,) = re.findall(r"; lower per_device_train_batch_size to (\d+), or raise the limit", never.verdict)
    fits = int(lower)
    _, tasks, memory = prepared(tmp_path, tiny_base, limit, **batch | {"per_device_train_batch_size": fits})
    know_task(memory, tasks[0])
    MemoryLimit(memory, limit, [BASE], 0).check(tasks[0].name)
    assert fits > 100  # of the longest samples; of others more would


def test_validate_prints_it(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    shown = run("validate", path).stdout
    assert "base model and libraries" in shown
    assert "no scheduler.memory_limit: all adapters run together" in shown
    result = run("validate", path, "--set", "scheduler.memory_limit=50MiB", "--set", "pipeline.stages=2")
    assert result.exit_code == 1
    assert "stage 1" in result.stdout
    assert result.stdout.count("  refused\n") == 2
    assert "first: refused: nothing is left for adapters: of scheduler.memory_limit 50 MiB" in result.stderr


def test_a_limit_without_processes_for_the_stages_is_refused(
    run: Run, tiny_base: Path, tmp_path: Path
) -> None:
    from mlora.errors import RunError
    from mlora.run.run import train

    data = run_data(tiny_base, tmp_path) | {
        "scheduler": {"memory_limit": "8GiB"},
        "pipeline": {"stages": 2},
    }
    with pytest.raises(RunError, match=r"^scheduler\.memory_limit: needs a process for each stage"):
        train(resolve_config(data, folder=tmp_path))
