"""A run's place in a pipeline of several processes, of which stage 0 leads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from types import FrameType
from typing import Any

import torch.distributed as dist

from mlora.config import NOT_IN_THIS_VERSION, RunConfig
from mlora.errors import RunError, first_line
from mlora.pipeline import PeerError, Watch, World
from mlora.worker import end_with_parent

PEERS_FIRST = 8.0  # seconds in which the watch finds the fault of another stage, which then ends this process
SIGNAL_WAITS = 2.0  # seconds; torchrun sends SIGTERM when a stage has died, which the watch is about to tell
# keys that may differ between the machines of a pipeline
LOCAL = ("base_model", "output_dir", "device")


@dataclass(frozen=True)
class Member:
    """This process's part in a pipeline.

    Attributes:
        world: the pipeline's processes.
        watch: watches the others.
        in_flight: names of the adapters that this stage is working on; kept up by the engine, read by the
            watch.
    """

    world: World
    watch: Watch
    in_flight: list[str] = field(default_factory=list)


def is_launched() -> bool:
    """Say whether a launcher has started this process as one of several, or of one."""
    return dist.is_torchelastic_launched()


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
    in_flight: list[str] = []
    with Watch(world, lambda: ", ".join(in_flight)) as watch:
        try:
            _agree(world, config)
            yield Member(world, watch, in_flight)
        except PeerError as error:
            watch.report(first_line(error), after=PEERS_FIRST)
            raise SystemExit(1) from None
        except (RunError, KeyboardInterrupt) as error:
            if watch.report(first_line(error), told=True):
                raise
            raise SystemExit(1) from None
        except SystemExit:
            watch.report("was told to end", told=True, after=SIGNAL_WAITS)
            raise


def _set_signals(world: World) -> None:
    """Stage 0 alone ends a run that a signal interrupts; the others end when it does."""
    if world.rank:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _agree(world: World, config: RunConfig) -> None:
    try:
        world.agree(facts(config))
    except ValueError as error:
        raise RunError(str(error)) from error


def _world(config: RunConfig) -> World | None:
    try:
        world = World.from_launcher()
    except ValueError as error:
        raise RunError(str(error)) from error
    size, stages = world.size if world else 1, config.pipeline.stages
    if size != stages:
        if world and world.rank:
            raise SystemExit(1)
        raise RunError(f"pipeline.stages: is {stages}, but the launcher has started {size} processes")
    return world if size > 1 else None


def facts(config: RunConfig) -> dict[str, Any]:
    """Return what every process of a pipeline has to hold alike.

    Args:
        config: the run's.
    """
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    values = {key: value for key, value in config.model_dump(mode="json").items() if key not in LOCAL}
    return {"mlora": version("mlora-ext"), **versions, "config": values}


def check_member(member: Member | None) -> None:
    """Check that a run can be led from a process's part in a pipeline.

    Args:
        member: the part; none where the run has one stage.

    Raises:
        RunError: there is one, for which this version has no engine.
    """
    if member:
        raise RunError(f"pipeline.stages: {member.world.size} {NOT_IN_THIS_VERSION}; set it to 1")


def run_stage(config: RunConfig, member: Member) -> None:
    """Serve one of the stages after the first, until stage 0 ends the run.

    Args:
        config: the run's.
        member: this process's part.

    Raises:
        PeerError: always, in this version, which has no engine of several stages; stage 0 tells of it.
    """
    raise PeerError(f"stage {member.world.rank} of {config.pipeline.stages} has no engine")
