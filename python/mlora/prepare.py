"""What comes before a run's next iteration: data read, base model loaded, adapters created or restored."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from mlora.base_info import BaseInfo
from mlora.config import PipelineConfig, RunConfig
from mlora.crew import Crew
from mlora.device import choose_device, dtype_of, is_out_of_memory
from mlora.doubts import lora_doubts
from mlora.early import check_blocks
from mlora.engine import Engine
from mlora.errors import RunError, first_fault, first_line
from mlora.groups import assign, group_count, most_under_way
from mlora.malloc import keep_freed_memory
from mlora.report import Reporter, Silent
from mlora.run_folder import RunFolder
from mlora.stages import Member, crew_of, own_stage, usual_lengths_of
from mlora.tasks import Progress, Task, TaskBuilder


class Prepared:
    """A run before its next iteration.

    Args:
        config: its config.
        base: its base model, without weights.
        engine: holds the running adapters.
        tasks: all tasks but the refused.
        refused: why adapters were refused, by name.
        groups: the group of each task by name; the tasks of a group are batched together.
        iteration: iterations made.
        seconds: wall time of earlier parts.
    """

    def __init__(
        self,
        config: RunConfig,
        base: BaseInfo,
        engine: Engine,
        tasks: list[Task],
        refused: dict[str, str],
        groups: dict[str, int],
        iteration: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self.config = config
        self.base = base
        self.engine = engine
        self.tasks = tasks
        self.refused = refused
        self.groups = groups
        self.iteration = iteration
        self.seconds = seconds


def prepare(
    config: RunConfig,
    reporter: Reporter,
    checkpoint: dict[str, Any] | None = None,
    member: Member | None = None,
    *,
    trace: int = 0,
) -> Prepared:
    """Read the data, load the base model and create the adapters; write nothing.

    Args:
        config: a resolved config.
        reporter: told of warnings and of refused adapters.
        checkpoint: what the run continues from.
        member: this process's part in a pipeline over processes.
        trace: spans that each stage shall keep.

    Returns:
        The run before its next iteration.

    Raises:
        RunError: the base model cannot be loaded, every adapter was refused, or data changed since the
            checkpoint.
    """
    choose_device(config.device, dtype_of(config))  # at the start: reading the data may take long
    base = BaseInfo(config.base_model, config.base_folder)
    check_blocks(config, base.blocks)
    builder = TaskBuilder(config, base)
    refused: dict[str, str] = dict(checkpoint["refused"]) if checkpoint else {}
    faults: dict[str, str] = {}
    tasks = []
    for adapter in config.adapters:
        if adapter.name in refused:
            continue
        if checkpoint and _progress(adapter.name, checkpoint).state != "running":
            tasks.append(builder.ended(adapter, checkpoint["total_steps"][adapter.name]))
            continue
        try:
            tasks.append(builder.build(adapter))
        except RunError as error:
            if checkpoint:
                raise RunError(f"{adapter.name}: {error}") from error
            faults[adapter.name] = str(error)
    _tell(faults, reporter)
    for line in builder.warnings:
        reporter.warn(line)
    if not tasks:
        raise RunError("every adapter was refused; nothing to train")
    with ExitStack() as unless_prepared:
        with warnings_to(reporter):
            engine = make_engine(config, tasks, member, trace)
            unless_prepared.callback(engine.close)
            if checkpoint:
                groups, made = _groups(config, tasks, checkpoint), checkpoint["iteration"]
                _restore(engine, tasks, groups, checkpoint)
                unless_prepared.pop_all()
                return Prepared(config, base, engine, tasks, refused, groups, made, checkpoint["seconds"])
            groups = assign(tasks, group_count(config))
            late = _create(engine, tasks, groups, reporter)
        _tell(late, reporter)
        tasks = [task for task in tasks if task.name not in late]
        if not tasks:
            raise RunError("every adapter was refused; nothing to train")
        unless_prepared.pop_all()
    return Prepared(config, base, engine, tasks, faults | late, groups)


def _create(
    engine: Engine, tasks: Sequence[Task], groups: Mapping[str, int], reporter: Reporter
) -> dict[str, str]:
    """Create the adapters of tasks, and return by name why some were refused."""
    faults = {}
    for task in tasks:
        try:
            create_adapter(engine, task, groups)
        except ValueError as error:
            faults[task.name] = str(error).removeprefix(f"adapter {task.name!r}: ")
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(f"{task.name}: out of memory for its weights; lower lora.r") from error
        else:
            for line in lora_doubts(engine.registry, task.name, task.lora) if task.lora else ():
                reporter.warn(line)
    return faults


@contextmanager
def warnings_to(reporter: Reporter) -> Iterator[None]:
    """Tell a reporter of the warnings that libraries give, each once.

    Args:
        reporter: told of their first lines.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    lines = [first_line(w.message) for w in caught if isinstance(w.message, UserWarning)]
    for line in dict.fromkeys(lines):
        reporter.warn(line)


def _tell(faults: Mapping[str, str], reporter: Reporter) -> None:
    """Tell why adapters are refused, those of one fault, such as a missing file, in one line."""
    names: dict[str, list[str]] = {}
    for name, message in faults.items():
        names.setdefault(message, []).append(name)
    for message, refused in names.items():
        reporter.fault(f"{', '.join(refused)}: refused: {message}")


def make_engine(config: RunConfig, tasks: Sequence[Task], member: Member | None, trace: int) -> Engine:
    """Load a run's base model.

    Without a member, several stages are threads of this process.

    Args:
        config: a resolved config.
        tasks: of the run.
        member: this process's part in a pipeline over processes.
        trace: spans that each stage shall keep.

    Returns:
        An engine without adapters.

    Raises:
        RunError: the model cannot be loaded, is not one that can be trained here, or the device is not there.
    """
    dtype = dtype_of(config)
    try:
        device = choose_device(config.device, dtype)
        if device == "cpu":
            keep_freed_memory()
        pipeline = config.pipeline
        engine = Engine(
            config.base_model,
            device=device,
            dtype=dtype,
            fp16=config.fp16,
            gradient_checkpointing=config.gradient_checkpointing,
            pack_base=config.pack_base,
            seed=config.seed,
            stages=pipeline.partition or pipeline.stages,
            schedule=pipeline.schedule,
            micro_batches=pipeline.micro_batches,
            in_flight=most_under_way(config),
            trace=trace,
            crew=_crew(config, tasks, member, trace) if member else None,
        )
        with ExitStack() as stack:
            stack.push(engine)
            # stages that measure for themselves could choose differently
            library = config.base_gemm or (None if engine.alone else engine.base_gemm)
            if library:
                engine.base_gemm = library
            stack.pop_all()
        return engine
    except (ValueError, OSError, SafetensorError) as error:
        line = first_line(error)
        if line.startswith("stages:"):
            line = f"pipeline.{'partition' if config.pipeline.partition else 'stages'}:{line[7:]}"
        named = line.startswith(("base_", "pack_base", "pipeline."))
        raise RunError(line if named else f"base_model: cannot load {config.base_model}: {line}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"base_model: out of memory while {config.base_model} is loaded") from error


def _crew(config: RunConfig, tasks: Sequence[Task], member: Member, trace: int) -> Crew:
    lengths = usual_lengths(tasks, config)
    usual_lengths_of(member, lengths)
    return crew_of(config, own_stage(config, member, lengths, trace))


def usual_lengths(tasks: Sequence[Task], config: RunConfig) -> list[int]:
    """Return the rows of the sequences of one of a run's usual micro-batches.

    Args:
        tasks: with their data, but for those that have ended.
        config: the run's.
    """
    tasks = [task for task in tasks if task.data.samples]
    groups = assign(tasks, group_count(config))
    first = [task for task in tasks if groups[task.name] == 0]
    batches = [[task.data.samples[row] for row in task.plan.batch(0)] for task in first]
    lengths = [len(sample.input_ids) for batch in batches for sample in batch]
    return lengths[:: config.pipeline.micro_batches] or [512]


def create_adapter(engine: Engine, task: Task, groups: Mapping[str, int]) -> None:
    """Create a task's adapter as it is before its first step; groups go to the replicas in turn.

    Args:
        engine: where.
        task: what.
        groups: the group of each task by name.

    Raises:
        ValueError: the engine refuses the adapter.
    """
    replica = groups[task.name] % engine.replicas
    init_from = task.config.init_from
    engine.create_adapter(
        task.name, task.lora, task.optim, init_from=init_from, seed=task.seed, replica=replica
    )


def _restore(
    engine: Engine, tasks: Sequence[Task], groups: Mapping[str, int], checkpoint: dict[str, Any]
) -> None:
    for task in tasks:
        task.progress = _progress(task.name, checkpoint)
        if task.progress.state != "running":
            continue
        if fingerprints(task) != checkpoint["data"][task.name]:
            raise RunError(f"{task.name}: its data changed since the checkpoint; train anew with --overwrite")
        try:
            create_adapter(engine, task, groups)
            engine.load_state_dict(task.name, checkpoint["adapters"][task.name])
        except ValueError as error:
            raise RunError(f"{task.name}: cannot be restored: {first_line(error)}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{task.name}: cannot be restored: its checkpoint does not hold an adapter's state "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error


def _groups(config: RunConfig, tasks: Sequence[Task], checkpoint: dict[str, Any]) -> dict[str, int]:
    """Those of the checkpoint, so that batches are composed alike, unless the pipeline is another one now."""
    before = PipelineConfig.model_validate(checkpoint["config"]["pipeline"])
    if group_count(config.model_copy(update={"pipeline": before})) == group_count(config):
        groups: dict[str, int] = checkpoint["groups"]
        return groups
    return assign(tasks, group_count(config))


def _progress(name: str, checkpoint: dict[str, Any]) -> Progress:
    """How far an adapter had come.

    Raises:
        RunError: its checkpoint does not say so.
    """
    needed = ["tasks", "total_steps"]
    if checkpoint["tasks"].get(name, {}).get("state") == "running":
        needed += ["data", "adapters"]
    lacking = [key for key in needed if name not in checkpoint[key]]
    if lacking:
        raise RunError(f"{name}: cannot be restored: its checkpoint lacks {lacking[0]}.{name}")
    try:
        return TypeAdapter(Progress).validate_python(checkpoint["tasks"][name])
    except ValidationError as error:
        raise RunError(f"{name}: cannot be restored: tasks.{name}.{first_fault(error)}") from error


def fingerprints(task: Task) -> list[str]:
    """Return the SHA-256 of each of a task's files."""
    return [data.fingerprint for data in (task.data, task.eval_data) if data is not None]


def validate(config: RunConfig, reporter: Reporter | None = None) -> Prepared:
    """Do everything that comes before the first step of a run: read, check and load; write nothing.

    Args:
        config: a resolved config.
        reporter: told of warnings and of adapters that would be refused.

    Returns:
        The run as it would begin; its engine is closed.

    Raises:
        RunError: as :func:`train`, but for an ``output_dir`` that is not empty.
    """
    reporter = reporter or Silent()
    folder = RunFolder(config.output_dir)
    folder.check_writable()
    if folder.holds_something():
        reporter.warn(f"output_dir: {folder.path} is not empty; `mlora train` will ask for --overwrite")
    prepared = prepare(config, reporter)
    prepared.engine.close()
    return prepared
