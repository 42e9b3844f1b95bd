"""A run's place in a pipeline of several processes, of which stage 0 leads."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from mlora.cluster.device import dtype_of, is_out_of_memory, limit_allocator, own_device, set_malloc
from mlora.cluster.imports import is_importing
from mlora.cluster.watchdog import Watch
from mlora.cluster.worker import end_with_parent
from mlora.cluster.world import PeerError, World
from mlora.config.run_config import RunConfig
from mlora.engine.stage_group import StageGroup, StageOptions, stage_of_this_process
from mlora.engine.stage_worker import StageWorker
from mlora.errors import RunError, first_line
from mlora.model.base_info import BaseInfo
from mlora.model.stage_weights import digest
from mlora.pipeline import FirstStage, PipelineError, StageProcess
from mlora.planning.measured_cut import measured_cut
from mlora.simulate.trace_file import SPANS
from mlora.tasks.groups import most_under_way

STAGE_0_FIRST = 2.0  # seconds in which stage 0 tells of a fault that all have
PEERS_FIRST = 8.0  # seconds in which the watch finds the fault of another stage, which then ends this process
SIGNAL_WAITS = 2.0  # seconds; torchrun sends SIGTERM when a stage has died, which the watch is about to tell
# keys that may differ between the machines of a pipeline
LOCAL: Any = {
    "base_model": True,
    "output_dir": True,
    "device": True,
    "datasets": {"__all__": {"path"}},
    "adapters": {"__all__": {"init_from"}},
}


@dataclass(eq=False)
class Member:
    """This process's part in a pipeline.

    Attributes:
        world: the pipeline's processes.
        watch: watches the others.
        in_flight: says which adapters its stage is working on; before there is one, none.
        work: counts what its stage does; see `Runner.piece`.
        put_right: called before a fault of another process ends this one.
        met: whether the processes have told each other of a usual micro-batch.
    """

    world: World
    watch: Watch = field(init=False)
    in_flight: Callable[[], list[str]] = list
    work: Callable[[], int] = int
    put_right: Callable[[], None] = lambda: None
    met: bool = False


def check_replicas(config: RunConfig, member: Member | None) -> None:
    """Refuse replicas without processes for them.

    Args:
        config: the run's.
        member: this process's part in a pipeline over processes, if it has one.

    Raises:
        RunError: there are none.
    """
    if config.pipeline.replicas > 1 and member is None:
        raise RunError(
            f"pipeline.replicas: {config.pipeline.replicas} need processes of their own: start the run with "
            "`mlora train`, or under torchrun"
        )


@contextmanager
def membership(config: RunConfig) -> Iterator[Member | None]:
    """Join the pipeline that a launcher has started this process for, and leave it in order.

    An error inside ends every process; it is told once.

    Args:
        config: the run's.

    Yields:
        This process's part; none where the run has one stage.

    Raises:
        RunError: the processes do not fit the config or each other, and this one is to tell of it.
        SystemExit: after an error of another process, or its consequence.
    """
    world = _world(config)
    if world is None:
        yield None
        return
    end_with_parent(os.getppid())
    _set_signals(world)
    member = Member(world)
    with Watch(
        world, lambda: ", ".join(member.in_flight()), lambda _: member.put_right(), lambda: member.work()
    ) as watch:
        member.watch = watch
        try:
            _agree(world, config)
            if world.rank:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            yield member
            if world.rank == 0 and not member.met:
                usual_lengths_of(member, None)  # there was nothing to do, for which the others wait
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


def _set_signals(world: World) -> None:
    """Stage 0 alone ends a run that a signal interrupts; the others end when it does.

    Until all have met, SIGTERM ends each: a launcher sends it when a process has ended that the others do not
    see yet.
    """
    if world.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)


def _tell_in_peace() -> None:
    """Of an error, which ends this process anyway: a launcher sends SIGTERM when another one has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    if is_importing(frame):
        os._exit(128 + number)
    raise SystemExit(128 + number)


def _agree(world: World, config: RunConfig) -> None:
    try:
        world.agree(facts(config))
    except ValueError as error:
        raise RunError(str(error)) from error
    _check_size(world.size, config)


def _check_size(size: int, config: RunConfig) -> None:
    pipeline = config.pipeline
    if size != pipeline.processes:
        times = f" times pipeline.replicas {pipeline.replicas}" if pipeline.replicas > 1 else ""
        raise RunError(
            f"pipeline.stages: is {pipeline.stages}{times}, but the launcher has started {size} processes; "
            "start one process for each stage of each replica, or say --stages"
        )


def _world(config: RunConfig) -> World | None:
    try:
        world = World.from_launcher()
    except ValueError as error:
        raise RunError(str(error)) from error
    if world is None or world.size == 1:
        _check_size(1, config)
        return None
    return world


def facts(config: RunConfig) -> dict[str, Any]:
    """Return what every process of a pipeline has to hold alike.

    Args:
        config: the run's.
    """
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    values = config.model_dump(mode="json", exclude=LOCAL)
    base = BaseInfo(config.base_model, config.base_folder).config.to_dict()
    base.pop("_name_or_path", None)  # each machine has the model where it likes
    weights = digest(config.base_model)
    return {
        "mlora": version("mlora-ext"),
        **versions,
        "config": values,
        "base_model": base,
        "base_model weights": weights,
    }


def usual_lengths_of(member: Member, lengths: Sequence[int] | None) -> list[int] | None:
    """Tell of a usual micro-batch, or be told; all processes of a pipeline call it once.

    Args:
        member: this process's part.
        lengths: rows of its sequences, which stage 0 knows when it has read its data; none elsewhere.

    Returns:
        Those of stage 0, or none where it has nothing to do.
    """
    found: list[int] | None = member.world.gather("lengths", lengths)[0]
    member.met = True
    return found


class OwnStage(NamedTuple):
    """A process's stage.

    Attributes:
        part: the stage.
        process: its place in the pipeline.
        blocks: of each stage.
    """

    part: StageWorker
    process: StageProcess
    blocks: list[int]


def own_stage(config: RunConfig, member: Member, lengths: Sequence[int], trace: int) -> OwnStage:
    """Make this process's stage; all processes of a pipeline call it.

    Args:
        config: the run's.
        member: this process's part.
        lengths: of `usual_lengths_of`.
        trace: spans to keep.

    Raises:
        ValueError: the model cannot be loaded, cut or trained on packed rows.
    """
    world, pipeline = member.world, config.pipeline
    dtype = dtype_of(config)
    options = StageOptions(
        torch.device(own_device(config.device, dtype, world.local_rank)),
        dtype,
        config.gradient_checkpointing,
        config.pack_base,
    )
    if options.device.type == "cpu":
        set_malloc(config)
    else:
        torch.cuda.set_device(options.device)
        limit_allocator(config, options.device)
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
    return OwnStage(part, process, blocks)


def stage_group_of(config: RunConfig, stage: OwnStage) -> StageGroup:
    """Return the stages as stage 0 sees them.

    Args:
        config: the run's.
        stage: stage 0.
    """
    first = FirstStage(stage.process)
    return StageGroup(
        first, stage.part, stage.blocks, config.pipeline.replicas, config.base_model, spread=True
    )


def run_stage(config: RunConfig, member: Member, *, trace: bool = False) -> None:
    """Serve one of the stages after the first, until stage 0 ends the run.

    Args:
        config: the run's.
        member: this process's part.
        trace: whether stage 0 will ask what this one did when.

    Raises:
        SystemExit: the stage cannot be made, or memory ran out; one process has told why.
        PipelineError: another stage failed.
    """
    try:
        lengths = usual_lengths_of(member, None)
        if lengths is None:
            return
        process = own_stage(config, member, lengths, SPANS if trace else 0).process
    except (ValueError, OSError, SafetensorError) as error:
        # stage 0 tells of the same fault, where it has it
        member.watch.report(first_line(error), after=STAGE_0_FIRST)
        raise SystemExit(1) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        member.watch.report(f"out of memory while {config.base_model} is loaded")
        raise SystemExit(1) from None
    try:
        process.serve()
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, PipelineError) or not is_out_of_memory(error):
            raise
        member.watch.report(f"out of memory; {less_memory(config.output_dir)}")
        raise SystemExit(1) from None


def less_memory(run_dir: Path | str) -> str:
    """Return what a user can do when memory has run out.

    Args:
        run_dir: the run's folder.
    """
    return (
        "lower per_device_train_batch_size or max_length and train anew, or set gradient_checkpointing in "
        f"{Path(run_dir) / 'config.yaml'} and `mlora resume {run_dir}`"
    )
