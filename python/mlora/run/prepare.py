"""Prepares a run's next iteration: reads data, loads the base model, creates or restores adapters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from mlora.cluster.device import choose_device, dtype_of, set_allocators
from mlora.config.adapter_config import AdapterConfig
from mlora.config.conflicts import offload_faults, quantization_faults
from mlora.config.dataset_config import DatasetConfig
from mlora.config.faults import path_of
from mlora.config.run_config import RunConfig
from mlora.config.training_fields import idle_defaults, inherited
from mlora.engine.engine import Engine
from mlora.engine.full_engine import FullEngine
from mlora.engine.measured_samples import MeasuredSamples
from mlora.errors import RunError, first_fault, first_line, reason_of
from mlora.memory.meter import left_by_runs, used_memory
from mlora.memory.room import MemoryLimit
from mlora.model.base_info import BaseInfo, router_loss_fault
from mlora.offload.base_bytes import BaseBytes
from mlora.optim.registry import optimizer_kind
from mlora.planning.task_memory import LIMIT, memory_need
from mlora.run.callback_factory import check_callbacks
from mlora.run.decisions import Decisions
from mlora.run.inputs import check_inputs, check_sweep, inputs_of_sweep
from mlora.run.machine_choice import base_gemm_of_gpu, base_gemm_of_machine, use_base_gemm
from mlora.run.preflight import check_blocks, check_folders
from mlora.run.reporter import Reporter
from mlora.run.stages import Member, loading_fault, stage_0
from mlora.run.task_table import TaskTable
from mlora.run.trackers.tracking import check_trackers
from mlora.run.trial_losses import faults_of_own_losses
from mlora.scheduler import token_balanced
from mlora.store.run_folder import RunFolder
from mlora.store.submission import submitted
from mlora.tasks.groups import held_batches, most_under_way, slot_count
from mlora.tasks.task import ALIVE, Progress, Task, TaskBuilder, check_loss
from mlora_ext.backends.gpu_base_gemm import DEFAULT
from mlora_ext.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from mlora.sweep.trials import Sweep


_NOTHING = "every adapter was refused; nothing to train"


@dataclass(eq=False)
class Prepared:
    """A run before its next iteration.

    Attributes:
        iteration: iterations made so far.
        seconds: wall time of earlier parts of the run.
        loaded: bytes that this process used before any adapter, after a small micro-batch; 0 = not measured.
        placed: where the bytes of the base model are, for each stage; empty = not measured.
        sweep_inputs: what `inputs_of_sweep` returned.
        data: the digests of tasks' data in the checkpoint that the run goes on from.
        rounds: how far the groups of that checkpoint had come, and whether a callback asked for another one.
    """

    config: RunConfig
    base: BaseInfo
    engine: Engine
    table: TaskTable
    decisions: Decisions
    iteration: int = 0
    seconds: float = 0.0
    loaded: int = 0
    placed: Sequence[BaseBytes] = ()
    sweep_inputs: Mapping[str, list[str]] = field(default_factory=dict)
    data: Mapping[str, list[str]] = field(default_factory=dict)
    rounds: Mapping[str, Any] = field(default_factory=dict)


def prepare(
    config: RunConfig,
    reporter: Reporter,
    checkpoint: dict[str, Any] | None = None,
    member: Member | None = None,
    *,
    came: Mapping[str, Mapping[str, Any]] | None = None,
    entry: Mapping[str, Any] | None = None,
    trace: int = 0,
    measure: bool = False,
) -> Prepared:
    """Reads the data, loads the base model and creates or restores the adapters.

    It writes nothing but the machine's choice of `base_gemm`, and not even that if `measure`.
    `came` holds the submissions taken before the checkpoint, by task name. `entry` is the journaled first
    decision of a run without a checkpoint; None = decide anew. `trace` is the number of spans that each stage
    keeps. `measure` asks for `Prepared.loaded` and `placed`.
    """
    device = choose_device(config.device, dtype_of(config))
    _check_config(config, device)
    earlier = left_by_runs(torch.device(device))
    base = BaseInfo(config.base_model, config.base_folder)
    _check_base(config, base)
    if checkpoint:
        _check_same_base(base, checkpoint, reporter)
    sweep_inputs = inputs_of_sweep(config)
    if checkpoint:
        check_sweep(sweep_inputs, checkpoint)
    builder = TaskBuilder(config, base)
    tasks, refused, faults = _tasks(config, builder, checkpoint, came or {})
    if not checkpoint:
        faults |= faults_of_own_losses(tasks, torch.device(device), warn=reporter.warn)
        tasks = [task for task in tasks if task.name not in faults]
    for message in dict.fromkeys(faults.values()):  # one line for all that share a fault, as a missing file
        names = [name for name, fault in faults.items() if fault == message]
        reporter.fault(f"{', '.join(names)}: refused: {message}")
    for line in [*builder.warnings, *_without_evaluations(config)]:
        reporter.warn(line)
    told = len(builder.warnings)
    if not tasks and not config.sweep:
        raise RunError(_NOTHING)
    sweep = sweep_of(config, warn=reporter.warn)
    with ExitStack() as unless_prepared:
        with warnings_to(reporter), _disk_faults():
            trials = [] if tasks else _some_trials(config, builder, torch.device(device))
            for line in builder.warnings[told:]:
                reporter.warn(line)
            if config.base_gemm is None and device == "cpu" and not measure:
                library = base_gemm_of_machine(dtype_of(config), reporter)
                config = config.model_copy(update={"base_gemm": library})
            engine = make_engine(config, tasks or trials, member, trace)
            unless_prepared.callback(engine.close)
            loaded, placed = (_used_by_base(engine), engine.base_bytes()) if measure else (0, [])
            if (config.base_gemm or DEFAULT) == "fastest" and config.method != "full":
                base_gemm_of_gpu(engine, reporter, keep=not measure)
            memory = limit_memory(config, engine, earlier)
            folder = RunFolder(config.output_dir)
            if isinstance(engine, FullEngine):
                engine.folder = folder.states
            table = TaskTable(engine, builder, tasks, refused | faults, folder, reporter, memory, sweep)
            decisions = Decisions(config, table)
            if checkpoint:
                for task in table.alive():
                    check_inputs(task, checkpoint)
                decisions.restore(checkpoint)
            else:
                if memory:
                    reporter.note("scheduler.memory_limit: looking at what adapters need")
                decisions.start(entry)
        if not table.tasks and not config.sweep:
            raise RunError(_NOTHING)
        unless_prepared.pop_all()
    iteration, seconds = (checkpoint["iteration"], checkpoint["seconds"]) if checkpoint else (0, 0.0)
    data, rounds = (checkpoint["data"], checkpoint.get("rounds") or {}) if checkpoint else ({}, {})
    facts = (iteration, seconds, loaded, placed, sweep_inputs, data, rounds)
    return Prepared(config, base, engine, table, decisions, *facts)


def _check_config(config: RunConfig, device: str) -> None:
    """Refuses what the device does not serve, before any data is read. Raises RunError."""
    for key, reason in offload_faults(config, device).items():
        raise RunError(f"{path_of(key)}: {reason}")
    unserved = device != "cpu" and (config.quantization or dtype_of(config) == torch.float32)
    if config.base_gemm == "mlora" and unserved:
        raise RunError("base_gemm: 'mlora' serves plain weights in bf16 or fp16; take 'cublas'")
    _check_optimizers(config, device)
    check_folders(config)
    check_trackers(config)
    check_callbacks(config)
    for adapter in config.adapters:
        try:
            check_loss(adapter.objective)
        except RunError as error:
            raise RunError(f"{adapter.name}: {error}") from error


def _without_evaluations(config: RunConfig) -> list[str]:
    """Returns a line if no adapter has what defaults for evaluations need."""
    given = {**config.defaults.model_dump(exclude_unset=True)}
    idle = idle_defaults(given)
    if not idle or given.get("eval_dataset") or any(adapter.eval_dataset for adapter in config.adapters):
        return []
    return [f"defaults: {', '.join(idle)} change nothing, since no adapter has an eval_dataset"]


def _check_base(config: RunConfig, base: BaseInfo) -> None:
    """Refuses what the base model does not serve. Raises RunError."""
    if fault := router_loss_fault(base.config):
        raise RunError(fault)
    if base.quantization is not None:
        for key, reason in quantization_faults(config).items():
            raise RunError(f"{path_of(key)}: {reason}")
    check_blocks(config, base.blocks)


def _check_same_base(base: BaseInfo, checkpoint: Mapping[str, Any], reporter: Reporter) -> None:
    """Raises RunError if a checkpoint was written over another base model; the same one may have moved.

    A commit of the hub and a folder of files cannot be compared.
    """
    now = base.digest if "base" in checkpoint else base.name
    before = str(checkpoint.get("base", checkpoint["config"]["base_model"]))
    if now == before:
        return
    kind, _, commit = before.partition(":")
    if "base" in checkpoint and kind != now.partition(":")[0]:
        reporter.warn(f"base_model: {base.name} cannot be compared with the model of the checkpoint")
        return
    why = "its weights, config, end tokens or tokenizer differ; put that model back"
    if "base" in checkpoint and kind == "commit":
        why = (
            f"the hub has another commit of it now; download {commit} into a folder and give that: `mlora "
            "resume RUN --set base_model=FOLDER`"
        )
    raise RunError(
        f"base_model: {base.name} is not the model that the checkpoint was trained over: {why}, or train "
        "anew with `mlora train RUN.yaml --overwrite`"
    )


def _some_trials(config: RunConfig, builder: TaskBuilder, device: torch.device) -> list[Task]:
    """Builds sample trials of a sweep, by which the model is cut into stages.

    The samples hold each choice of the search space, so that a fault of all trials shows as a RunError.
    """
    found, faults = [], []
    for fields in config.sweep.samples() if config.sweep else []:
        try:
            adapter = AdapterConfig.model_validate(inherited(config.defaults.model_dump(), fields) | fields)
            check_loss(adapter.objective)
            found.append(builder.build(adapter))
        except RunError as error:
            faults.append(str(error))
    wrong = faults_of_own_losses(found, device, config.sweep.metric) if config.sweep else {}
    faults += wrong.values()
    found = [task for task in found if task.name not in wrong]
    if faults and not found:
        raise RunError(f"no trial can be trained: {faults[0]}")
    return found[: config.at_once]


def sweep_of(config: RunConfig, warn: Callable[[str], object] | None = None) -> Sweep | None:
    """Returns the run's sweep, if it holds one. Raises RunError if Optuna refuses the config.

    `warn` is told of losses that cannot be compared.
    """
    if config.sweep is None:
        return None
    if warn and config.sweep.metric == "eval_loss" and "objective" in config.sweep.search:
        warn(
            "sweep.metric: search changes objective, and losses of different objectives cannot be compared; "
            "rank by another metric, such as rewards/accuracies"
        )
    from mlora.sweep.trials import Sweep  # imports Optuna

    return Sweep(config)


def limit_memory(config: RunConfig, engine: Engine, earlier: int = 0) -> MemoryLimit | None:
    """Sets the run's memory limit, if it has one; see `Engine.limit_memory`."""
    limit = config.scheduler.limit_bytes
    if limit is None:
        return None
    import matplotlib.backends.backend_agg  # the end of the run draws with it: it belongs to the libraries
    import matplotlib.figure  # noqa: F401

    try:
        held = held_batches(config)
        return engine.limit_memory(limit, enforce=False, held=held, earlier=earlier, name=LIMIT)
    except ValueError as error:
        raise RunError(f"{LIMIT}: {first_line(reason_of(error, 'memory_limit'))}") from error


def _used_by_base(engine: Engine) -> int:
    """Returns the bytes in use before any adapter: after a small micro-batch, as with a limit."""
    if engine.replicas == 1 and not isinstance(engine, FullEngine):
        with suppress(ValueError):  # no layer takes an adapter; the refusals of the adapters say more
            MeasuredSamples(engine, limit=0).warm_up()
    engine.release_memory()
    return used_memory(engine.device)


def _tasks(
    config: RunConfig,
    builder: TaskBuilder,
    checkpoint: dict[str, Any] | None,
    came: Mapping[str, Mapping[str, Any]],
) -> tuple[list[Task], dict[str, str], dict[str, str]]:
    """Returns the run's tasks and, by name, why others were refused before and why some are refused now."""
    refused: dict[str, str] = dict(checkpoint["refused"]) if checkpoint else {}
    faults: dict[str, str] = {}
    tasks: list[Task] = []
    found: list[tuple[AdapterConfig, list[DatasetConfig]]] = [(adapter, []) for adapter in config.adapters]
    found += [submitted(name, content) for name, content in came.items() if name not in refused]
    if checkpoint:
        places = {name: place for place, name in enumerate(checkpoint["tasks"])}
        found.sort(key=lambda each: places.get(each[0].name, len(places)))
    for adapter, datasets in found:
        if adapter.name in refused or any(task.name == adapter.name for task in tasks):
            continue
        progress = _progress(adapter.name, checkpoint) if checkpoint else Progress()
        if checkpoint and progress.state not in ALIVE:
            tasks.append(builder.ended(adapter, checkpoint["total_steps"][adapter.name]))
        else:
            try:
                check_loss(adapter.objective)
                tasks.append(builder.build(adapter, datasets))
            except RunError as error:
                if checkpoint:
                    raise RunError(f"{adapter.name}: {error}") from error
                faults[adapter.name] = str(error)
                continue
        tasks[-1].progress = progress
    return tasks, refused, faults


def _check_optimizers(config: RunConfig, device: str) -> None:
    """Refuses optimizers that do not serve the device (RunError)."""
    for adapter in config.adapters if config.method == "lora" else []:
        try:
            optimizer_kind(adapter.optim).check(adapter.optim, torch.device(device))
        except ValueError as error:
            raise RunError(f"{adapter.name}: {error}") from error


@contextmanager
def warnings_to(reporter: Reporter) -> Iterator[None]:
    """Passes the warnings of libraries to a reporter: the first line of each, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    lines = [first_line(w.message) for w in caught if isinstance(w.message, UserWarning)]
    for line in dict.fromkeys(lines):
        reporter.warn(line)


@contextmanager
def _disk_faults() -> Iterator[None]:
    """Raises what the system says of a file or a folder as a RunError."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise RunError(loading_fault(error)) from error


def make_engine(config: RunConfig, tasks: Sequence[Task], member: Member | None, trace: int) -> Engine:
    """Loads the base model into an engine without adapters. Without a member, stages are threads."""
    dtype = dtype_of(config)
    try:
        device = choose_device(config.device, dtype)
        if member is None:
            set_allocators(config.scheduler.limit_bytes, torch.device(device))
        pipeline = config.pipeline
        kind = FullEngine if config.method == "full" else Engine
        engine = kind(
            config.base_model,
            device=device,
            dtype=dtype,
            fp16=config.fp16,
            gradient_checkpointing=config.gradient_checkpointing,
            frozen_weight=config.frozen_weight,
            seed=config.seed,
            stages=pipeline.partition or pipeline.stages,
            schedule=pipeline.schedule,
            micro_batches=pipeline.micro_batches,
            in_flight=most_under_way(config),
            trace=trace,
            stage_group=stage_0(config, member, usual_lengths(tasks, config), trace) if member else None,
            offload=config.offload.options,
            quantization=config.quantization,
        )
        with ExitStack() as stack:
            stack.push(engine)
            use_base_gemm(engine, config.base_gemm)
            stack.pop_all()
        return engine
    except (ValueError, OSError, SafetensorError) as error:
        line = loading_fault(error)
        if line.startswith("stages:"):
            line = f"pipeline.{'partition' if config.pipeline.partition else 'stages'}:{line[7:]}"
        named = line.startswith(("base_", "pack_base", "pipeline.", "offload.", "quantization"))
        raise RunError(line if named else f"base_model: cannot load {config.base_model}: {line}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"base_model: out of memory while {config.base_model} is loaded") from error


def usual_lengths(tasks: Sequence[Task], config: RunConfig) -> list[int]:
    """Returns the sequence lengths, in rows, of one usual micro-batch of the run."""
    needs = [memory_need(task, 0) for task in tasks if task.data.samples]
    slots = token_balanced(needs, slot_count(config), {})
    lengths = [length for need in needs if slots[need.name] == 0 for length in need.usual]
    return lengths[:: config.pipeline.micro_batches] or [512]


def _progress(name: str, checkpoint: dict[str, Any]) -> Progress:
    """Returns an adapter's progress. Raises RunError if the checkpoint lacks it."""
    needed = ["tasks", "total_steps"]
    if checkpoint["tasks"].get(name, {}).get("state") in ALIVE:
        needed += ["data"]
    lacking = [key for key in needed if name not in checkpoint[key]]
    if lacking:
        raise RunError(f"{name}: cannot be restored: its checkpoint lacks {lacking[0]}.{name}")
    try:
        return TypeAdapter(Progress).validate_python(checkpoint["tasks"][name])
    except ValidationError as error:
        raise RunError(f"{name}: cannot be restored: tasks.{name}.{first_fault(error)}") from error
