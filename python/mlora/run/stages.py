"""Joins a process to a pipeline of several processes, which stage 0 leads."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mlora.cluster.device import choose_device, dtype_of, set_allocators
from mlora.cluster.signals import end_at_once, set_handlers
from mlora.cluster.watchdog import Watch
from mlora.cluster.worker import end_with_parent
from mlora.cluster.world import PeerError, World
from mlora.config.run_config import RunConfig
from mlora.engine.stage_group import StageGroup, StageOptions, stage_of_this_process
from mlora.engine.stage_worker import StageWorker
from mlora.errors import RunError, file_line, first_line
from mlora.model.base_info import BaseInfo
from mlora.pipeline import PipelineError, StageProcess
from mlora.planning.profile_stage import measured_cut
from mlora.run.preflight import check_folders
from mlora.simulate.trace_file import SPANS
from mlora.tasks.groups import most_under_way
from mlora_ext.out_of_memory import is_out_of_memory

STAGE_0_FIRST = 2.0  # seconds; time for stage 0 to report a fault that all stages have
PEERS_FIRST = 8.0  # seconds; time for the watch to find another stage's fault and end this process
SIGNAL_WAITS = 2.0  # seconds; torchrun sends SIGTERM when a stage has died; the watch is about to report it
# keys that may differ between the machines of a pipeline
LOCAL: Any = {
    "base_model": True,
    "output_dir": True,
    "device": True,
    "report_to": True,
    "logging_dir": True,
    "datasets": {"__all__": {"path"}},
    "adapters": {"__all__": {"init_from"}},
    "offload": {"folders"},
}


@dataclass(eq=False)
class Member:
    """This process's part in a pipeline.

    Attributes:
        watch: watches the other processes.
        in_flight: returns the adapters that this stage is working on.
        work: returns the number of the piece of work that this stage is doing; see `Runner.piece`.
        put_right: called before a fault of another process ends this one.
        met: whether the processes have exchanged the usual micro-batch.
    """

    world: World
    watch: Watch = field(init=False)
    in_flight: Callable[[], list[str]] = list
    work: Callable[[], int] = int
    put_right: Callable[[], None] = lambda: None
    met: bool = False


def check_replicas(config: RunConfig, member: Member | None) -> None:
    """Refuses replicas where no launcher has started processes for them."""
    if config.pipeline.replicas > 1 and member is None:
        raise RunError(
            f"pipeline.replicas: {config.pipeline.replicas} need processes of their own: start the run with "
            "`mlora train`, or under torchrun"
        )


@contextmanager
def membership(config: RunConfig) -> Iterator[Member | None]:
    """Joins the pipeline that a launcher has started this process for, and leaves it in order.

    Yields None for a run of one stage. An error inside ends every process and is reported once: by this
    process as a RunError, or by another process, and then this one raises SystemExit.
    """
    try:
        world = World.from_launcher()
    except ValueError as error:
        raise RunError(str(error)) from error
    if world is None or world.size == 1:
        _check_size(1, config)
        yield None
        return
    end_with_parent(os.getppid())
    # Stage 0 alone ends a run on a signal; the other stages end when stage 0 does. Until the processes have
    # agreed on the config, signals but SIGINT end each of them: a launcher sends SIGTERM when a process has
    # died that the others do not see yet.
    if world.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_handlers(end_at_once)
    member = Member(world)
    with Watch(
        world, lambda: ", ".join(member.in_flight()), lambda _: member.put_right(), lambda: member.work()
    ) as watch:
        member.watch = watch
        try:
            try:
                world.agree(facts(config))
            except ValueError as error:
                raise RunError(str(error)) from error
            _check_size(world.size, config)
            if world.rank:
                set_handlers(signal.SIG_IGN)
            yield member
            if world.rank == 0 and not member.met:
                usual_lengths_of(member, None)  # nothing to do; the others wait for this call
        except (PeerError, PipelineError) as error:
            _tell_in_peace()
            watch.report(first_line(error), after=PEERS_FIRST)
            raise SystemExit(1) from None
        except (RunError, KeyboardInterrupt) as error:
            _tell_in_peace()
            if watch.report(first_line(error), told=True):
                raise
            raise SystemExit(1) from None
        except SystemExit:
            watch.report("was told to end", told=True, after=SIGNAL_WAITS)
            raise


def _tell_in_peace() -> None:
    """Ignores SIGTERM while an error is reported: a launcher sends it as soon as another process ends."""
    set_handlers(signal.SIG_IGN)


def _check_size(size: int, config: RunConfig) -> None:
    pipeline = config.pipeline
    if size != pipeline.processes:
        times = f" times pipeline.replicas {pipeline.replicas}" if pipeline.replicas > 1 else ""
        raise RunError(
            f"pipeline.stages: is {pipeline.stages}{times}, but the launcher has started {size} processes; "
            "start one process for each stage of each replica, or say --stages"
        )


def facts(config: RunConfig) -> dict[str, Any]:
    """Returns the facts in which all processes of a pipeline must agree."""
    info = BaseInfo(config.base_model, config.base_folder)
    base = info.config.to_dict()
    base.pop("_name_or_path", None)  # the model's folder may differ between machines
    return {
        "mlora": version("mlora-ext"),
        **{name: version(name) for name in ("torch", "transformers", "peft")},
        "config": config.model_dump(mode="json", exclude=LOCAL),
        "base_model": base,
        "base_model files": info.digest,
    }


def usual_lengths_of(member: Member, lengths: Sequence[int] | None) -> list[int] | None:
    """Sends the usual micro-batch of stage 0 to all processes; each process calls it once.

    Stage 0 passes the rows of its sequences, or None if there is nothing to do; the others pass None.
    """
    found: list[int] | None = member.world.gather("lengths", lengths)[0]
    member.met = True
    return found


def stage_0(config: RunConfig, member: Member, lengths: Sequence[int], trace: int) -> StageGroup:
    """Creates this process's stage, the first one, and returns the stages as it sees them.

    `lengths` are those of a usual micro-batch; `trace` is the number of spans that each stage keeps.
    """
    usual_lengths_of(member, lengths)
    part, process, blocks = _own_stage(config, member, lengths, trace)
    replicas = config.pipeline.replicas
    return StageGroup(process, part, blocks, replicas, spread=True)


def _own_stage(
    config: RunConfig, member: Member, lengths: Sequence[int], trace: int
) -> tuple[StageWorker, StageProcess, list[int]]:
    """Creates this process's stage; all processes call it. Returns the decoder blocks of each stage, too."""
    world, pipeline = member.world, config.pipeline
    dtype = dtype_of(config)
    device = choose_device(config.device, dtype)
    if device == "cuda":  # a machine's processes take its GPUs in turn
        device = f"cuda:{world.local_rank % torch.cuda.device_count()}"
    options = StageOptions(
        torch.device(device),
        dtype,
        config.gradient_checkpointing,
        config.frozen_weight,
        config.offload.options,
        quantization=config.quantization,
    )
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
    set_allocators(config.scheduler.limit_bytes, options.device)
    blocks = pipeline.partition or measured_cut(config, world, options, lengths)
    part, process = stage_of_this_process(
        config.base_model,
        blocks,
        options,
        pipeline.schedule,
        world,
        replicas=pipeline.replicas,
        in_flight=most_under_way(config),
        trace=trace,
    )
    member.in_flight, member.work = lambda: part.in_flight, lambda: process.runner.piece
    return part, process, blocks


def run_stage(config: RunConfig, member: Member, *, trace: bool = False) -> None:
    """Serves a stage after the first, until stage 0 ends the run.

    Raises SystemExit if the stage cannot be created or memory ran out; one process has reported why.
    """
    try:
        lengths = usual_lengths_of(member, None)
        if lengths is None:
            return
        check_folders(config)
        _, process, _ = _own_stage(config, member, lengths, SPANS if trace else 0)
    except (ValueError, OSError, SafetensorError) as error:
        # stage 0 reports the same fault first, if it has it
        member.watch.report(loading_fault(error), after=STAGE_0_FIRST)
        raise SystemExit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        member.watch.report(f"out of memory while {config.base_model} is loaded")
        raise SystemExit(1) from None
    try:
        process.serve()
    except OSError as error:
        if error.filename is None:
            raise
        member.watch.report(file_line(error))
        raise SystemExit(1) from None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, PipelineError) or not is_out_of_memory(error):
            raise
        member.watch.report(f"out of memory; {less_memory(config.output_dir)}")
        raise SystemExit(1) from None


def loading_fault(error: Exception) -> str:
    """Returns what went wrong while a base model was loaded, in one line."""
    if not isinstance(error, OSError) or error.filename is None:
        return first_line(error)
    scratch = Path(error.filename).is_dir()
    return f"{'offload.folders' if scratch else 'base_model'}: {file_line(error)}"


def less_memory(run_dir: Path | str) -> str:
    """Returns what a user can do when memory has run out."""
    return (
        "lower per_device_train_batch_size or max_length and train anew, or set gradient_checkpointing in "
        f"{Path(run_dir) / 'config.yaml'} and `mlora resume {run_dir}`"
    )
