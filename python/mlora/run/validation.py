"""Implements `mlora validate`: all that comes before a run's first step, and a forecast of its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mlora.config.run_config import RunConfig
from mlora.config.sections import OffloadConfig
from mlora.engine.dry_run import dry_stages
from mlora.engine.stage_group import StageOptions
from mlora.errors import RunError, first_line
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.meter import free_memory, used_at_first, used_memory
from mlora.memory.room import in_units
from mlora.objectives.custom import NOT_RUN
from mlora.objectives.options import OWN
from mlora.objectives.registry import name_of
from mlora.planning.memory_plan import MemoryPlan, Placement, memory_plan
from mlora.planning.task_memory import memory_need
from mlora.run.forecasts import forecast_lines
from mlora.run.prepare import Prepared, prepare, sweep_of
from mlora.run.reporter import Reporter
from mlora.run.trial_losses import faults_of_own_losses
from mlora.scheduler import token_balanced
from mlora.store.run_folder import RunFolder
from mlora.tasks.groups import slot_count
from mlora.tasks.task import Task


class Validated(NamedTuple):
    """What is known of a run before its first step.

    Attributes:
        prepared: the run with a closed engine and with all adapters, whatever its memory limit; samples stand
            for the trials of a sweep.
        plan: the forecast of its memory; None where that cannot be predicted: off the CPU, or with replicas.
        placement: where its parts are; None if it offloads nothing.
        quantized: what the quantised base takes, in a line; None if it is plain.
    """

    prepared: Prepared
    plan: MemoryPlan | None
    placement: Placement | None
    quantized: str | None = None


def validate(config: RunConfig, reporter: Reporter | None = None, *, run_code: bool = False) -> Validated:
    """Reads, checks and loads all that a run needs before its first step; writes nothing.

    Imports callbacks and losses of one's own, and tries the losses, only with `run_code`. An ``output_dir``
    that is not empty, and more memory than is free, are only warnings.
    """
    reporter = reporter or Reporter()
    folder = RunFolder(config.output_dir)
    folder.check_writable()
    if folder.holds_something():
        reporter.warn(f"output_dir: {folder.path} is not empty; a new run will ask for --overwrite")
    places, metric = (config.at_once, config.sweep.metric) if config.sweep else (None, "")
    if config.sweep is not None:
        sweep_of(config, warn=reporter.warn)
        config = RunConfig.model_validate(config.with_samples())
    if not run_code:
        config = _without_code(config, reporter)
    cpu = torch.device("cpu")
    before = used_memory(cpu)
    unlimited = config.scheduler.model_copy(update={"memory_limit": None})
    prepared = prepare(config.model_copy(update={"scheduler": unlimited}), reporter, measure=True)
    forecast: list[str] = []
    if config.offload != OffloadConfig() or config.method == "full":
        forecast = forecast_lines(prepared.engine, _first_group(config, prepared))
    trained = sum(p.numel() for p in prepared.engine.model.parameters()) if config.method == "full" else 0
    prepared.engine.close()
    if places:  # `prepare` knows of no sweep here
        lacking = faults_of_own_losses(prepared.table.tasks, prepared.engine.device, metric)
        for name, fault in lacking.items():
            prepared.table.refuse(name, fault)
    plan = _plan(config, prepared, before, min(before, used_at_first(cpu)))
    plan = replace(plan, places=places) if plan else None
    free = free_memory(cpu)
    if plan and plan.limit is None and free is not None:
        free += used_memory(cpu)  # this process's part is the run's
        if plan.together > free:
            reporter.warn(
                f"the run needs about {in_units(plan.together)} of memory, but {in_units(free)} are free; "
                "set scheduler.memory_limit, so that tasks wait for each other"
            )
    placement = None
    if config.offload != OffloadConfig():
        placement = Placement(prepared.placed, config.offload.options, plan, forecast, trained)
    return Validated(prepared, plan, placement, _quantized(config, prepared))


def _without_code(config: RunConfig, reporter: Reporter) -> RunConfig:
    """Returns a config whose adapters have stand-ins for code of users, and names what was left out."""
    adapters, left = [], set[str]()
    for adapter in config.adapters:
        changed: dict[str, Any] = {"callbacks": None}
        left |= {one if isinstance(one, str) else one["name"] for one in adapter.callbacks or ()}
        if ":" in (name := name_of(adapter.objective)):
            assert isinstance(adapter.objective, dict)
            left.add(name)
            own = {key: adapter.objective[key] for key in OWN}
            changed["objective"] = {"name": NOT_RUN, **own}
        adapters.append(adapter.model_copy(update=changed))
    if left:
        reporter.note(f"not run: {', '.join(sorted(left))}; add --run-code to import and try this code")
    return config.model_copy(update={"adapters": adapters})


def _quantized(config: RunConfig, prepared: Prepared) -> str | None:
    """Returns a line on the bytes of a quantised base, for each stage."""
    said = prepared.base.quantization
    if config.quantization is not None:
        how = config.quantization.method
    elif said is not None:
        how = f"as its files say ({said['quant_method']})"
    else:
        return None
    sizes = [in_units(base.resident) for base in prepared.placed]
    return f"base model: quantized, {how}: {', '.join(sizes)}" + (" by stage" if len(sizes) > 1 else "")


def _first_group(config: RunConfig, prepared: Prepared) -> list[Task]:
    """Returns the tasks that share the first group's micro-batches."""
    tasks = [task for task in prepared.table.tasks if task.data.samples]
    needs = [memory_need(task, 0) for task in tasks] if slot_count(config) > 1 else []
    slots = token_balanced(needs, slot_count(config), {})
    return [task for task in tasks if slots.get(task.name, 0) == 0]


def _plan(config: RunConfig, prepared: Prepared, before: int, new: int) -> MemoryPlan | None:
    """Predicts the run's memory by its stages; equal stages stand for those that the run will measure.

    `before`: bytes in use before the model was loaded. `new`: the same for a process that has made no run.
    """
    engine = prepared.engine
    if engine.device.type != "cpu" or config.pipeline.replicas > 1:
        return None
    options = StageOptions(
        engine.device,
        engine.dtype,
        config.gradient_checkpointing,
        config.frozen_weight,
        config.offload.options,
        quantization=config.quantization,
    )
    try:
        stages = dry_stages(config.base_model, options, config.pipeline.partition or config.pipeline.stages)
        adapters = AdapterMemory(stages)
        packed = 4 if config.pack_base else 1  # two copies, and oneDNN pads
        held = [packed * stage.base.memory for stage in stages]
        libraries = max(0, prepared.loaded - before - sum(held))  # taken by libraries during loading
        base = [new + libraries + size for size in held]
        return memory_plan(config, prepared.table.tasks, adapters, base)
    except ValueError as error:
        if config.scheduler.memory_limit is None:  # without a limit, a forecast is optional
            prepared.table.reporter.warn(f"memory cannot be predicted: {first_line(error)}")
            return None
        raise RunError(f"scheduler.memory_limit: {first_line(error)}") from error
