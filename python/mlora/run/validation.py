"""What `mlora validate` does: all that comes before a run's first step, and a forecast of its memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from mlora.config.run_config import RunConfig
from mlora.engine.stage_group import StageOptions
from mlora.errors import RunError, first_line
from mlora.files.run_folder import RunFolder
from mlora.memory.process_memory import used_at_first, used_memory
from mlora.planning.memory_plan import MemoryPlan, memory_plan
from mlora.planning.task_memory import TaskMemory, dry_stages
from mlora.run.prepare import Prepared, prepare, sweep_of
from mlora.run.report import Reporter, Silent


def validate(config: RunConfig, reporter: Reporter | None = None) -> tuple[Prepared, MemoryPlan | None]:
    """Do everything that comes before the first step of a run: read, check and load; write nothing.

    Args:
        config: a resolved config.
        reporter: told of warnings and of adapters that would be refused.

    Returns:
        The run as it would begin, with all adapters whatever its memory limit, or samples of a sweep's
        trials; its engine is closed. And what it will need of memory, where that can be predicted: on a CPU.

    Raises:
        RunError: as :func:`train`, but for an ``output_dir`` that is not empty.
    """
    reporter = reporter or Silent()
    folder = RunFolder(config.output_dir)
    folder.check_writable()
    if folder.holds_something():
        reporter.warn(f"output_dir: {folder.path} is not empty; a new run will ask for --overwrite")
    places = config.at_once if config.sweep else None
    if config.sweep is not None:
        sweep_of(config)
        config = RunConfig.model_validate(config.with_samples())
    cpu = torch.device("cpu")
    before = used_memory(cpu)
    unlimited = config.scheduler.model_copy(update={"memory_limit": None})
    prepared = prepare(config.model_copy(update={"scheduler": unlimited}), reporter, measure=True)
    prepared.engine.close()
    plan = _plan(config, prepared, before, min(before, used_at_first(cpu)))
    return prepared, replace(plan, places=places) if plan else None


def _plan(config: RunConfig, prepared: Prepared, before: int, new: int) -> MemoryPlan | None:
    """What a run will need, by the stages that it will have or, where those are measured, equal ones.

    Args:
        config: the run's.
        prepared: the run.
        before: bytes that the process had before it loaded the model.
        new: bytes that a process has then whose first run it is.
    """
    engine = prepared.engine
    if engine.device.type != "cpu" or config.pipeline.replicas > 1:
        return None
    options = StageOptions(engine.device, engine.dtype, config.gradient_checkpointing, config.pack_base)
    try:
        stages = dry_stages(config, options, config.pipeline.partition or config.pipeline.stages)
        memory = TaskMemory(stages)
        packed = 4 if config.pack_base else 1  # twice, and oneDNN pads
        held = [packed * stage.base_bytes for stage in stages]
        libraries = max(0, prepared.loaded - before - sum(held))  # what loading has made them take
        base = [new + libraries + size for size in held]
        return memory_plan(config, prepared.table.tasks, memory, base)
    except ValueError as error:
        if config.scheduler.memory_limit is None:  # nobody has asked for it
            return None
        raise RunError(f"scheduler.memory_limit: {first_line(error)}") from error
