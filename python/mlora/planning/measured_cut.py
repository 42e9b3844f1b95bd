"""Cuts a model into stages by what the processes measure together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from mlora.cluster.device import kind_of
from mlora.cluster.world import World
from mlora.config.run_config import RunConfig
from mlora.config.sections import PipelineConfig
from mlora.engine.stage_group import StageOptions
from mlora.memory.meter import free_memory
from mlora.planning.partition import Table, fastest, partition
from mlora.planning.profile_stage import profile_base
from mlora.tasks.groups import held_by


def measured_cut(config: RunConfig, world: World, options: StageOptions, lengths: Sequence[int]) -> list[int]:
    """Returns the number of blocks of each stage; all processes must call it, and all get the same.

    `lengths` are the sequence lengths of a usual micro-batch. Raises ValueError if no cut fits the free
    memory.
    """
    table = profile_base(
        config.base_model,
        tuple(lengths),
        options.device,
        options.dtype,
        gradient_checkpointing=options.gradient_checkpointing,
        streamed=options.offload.base == "disk",
        quantization=options.quantization,
    )
    mine = {
        "kind": kind_of(options.device),
        "table": asdict(table),
        "memory": [world.process.host, str(options.device), free_memory(options.device)],
    }
    found = world.gather("measured", mine)
    try:
        tables, limits = _tables(found, config.pipeline), _limits(found, config.pipeline)
        cut = partition(tables, limits, held_by(config), options.offload.slots)
    except ValueError as error:
        raise ValueError(f"{error}; name pipeline.partition to try one all the same") from error
    return [last - first for first, last in cut]


def _tables(found: Sequence[Mapping[str, Any]], pipeline: PipelineConfig) -> list[Table]:
    """Returns one table per stage: the slowest replica's."""
    measured = [(entry["kind"], TypeAdapter(Table).validate_python(entry["table"])) for entry in found]
    # differences between devices of one kind are noise
    least = {kind: fastest([table for other, table in measured if other == kind]) for kind, _ in measured}
    tables = [least[kind] for kind, _ in measured]

    def seconds(table: Table) -> float:
        return sum(block.seconds for block in table.blocks)

    return [max(tables[stage :: pipeline.stages], key=seconds) for stage in range(pipeline.stages)]


def _limits(found: Sequence[Mapping[str, Any]], pipeline: PipelineConfig) -> list[int | None]:
    """Returns each stage's free bytes, the least of its replicas; processes on a device share its memory."""
    places = [tuple(entry["memory"][:2]) for entry in found]
    sharing = Counter(places)
    free = [entry["memory"][2] for entry in found]
    shares = [None if f is None else f // sharing[place] for f, place in zip(free, places, strict=True)]
    stages = [shares[stage :: pipeline.stages] for stage in range(pipeline.stages)]
    return [min((share for share in stage if share is not None), default=None) for stage in stages]
