"""Measured times of a pipeline's stages and links, as `mlora simulate --times` reads them."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlora.errors import RunError, first_fault, first_line
from mlora.regular_files import open_regular
from mlora.simulate.workload import SimulatedLink, StageTime
from mlora.store.disk import os_errors


class MeasuredStage(BaseModel):
    """Median seconds of a stage."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    forward: float = Field(ge=0)  # forward, backward: of a micro-batch
    backward: float = Field(ge=0)
    optimizer: float = Field(default=0.0, ge=0)  # of an adapter's optimizer step


class MeasuredLink(BaseModel):
    """One direction between two neighbours."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    latency: float = Field(default=0.0, ge=0)  # seconds
    bandwidth: float | None = Field(default=None, gt=0)  # bytes per second; None = unlimited
    message_bytes: float = Field(default=0.0, ge=0)  # of a micro-batch
    overhead: float = Field(default=0.0, ge=0)  # seconds that each message occupies the link beyond its bytes

    def link(self, rows: int) -> SimulatedLink:
        """Returns the link for the simulator."""
        bandwidth = float("inf") if self.bandwidth is None else self.bandwidth
        return SimulatedLink(self.latency, bandwidth, self.message_bytes / rows, self.overhead)


class StageTimes(BaseModel):
    """The file: one JSON object with these keys.

    `{"rows": 512, "stages": [{"forward": 0.012, "backward": 0.014}, {"forward": 0.013, "backward": 0.015}],
    "forward": [{"latency": 5e-5, "bandwidth": 1.2e9, "message_bytes": 4194304}], "backward": [{...}]}`
    """

    model_config = ConfigDict(extra="forbid")

    rows: int = Field(default=1, ge=1)  # of the micro-batches that were measured
    stages: list[MeasuredStage] = Field(min_length=1)  # D of them, from the first
    forward: list[MeasuredLink] = []  # D - 1 links, each from a stage to the next; none = links take no time
    backward: list[MeasuredLink] = []  # D - 1 links back, the first from stage 1 to stage 0
    # number of adapters, or of groups that share batches, in the run; None = unknown
    streams: int | None = Field(default=None, ge=1)

    def stage_times(self) -> list[StageTime]:
        """Returns the stages for the simulator."""
        return [StageTime(stage.forward, stage.backward, optimizer=stage.optimizer) for stage in self.stages]

    def links(self) -> tuple[list[SimulatedLink], list[SimulatedLink]]:
        """Returns the links forward and backward for the simulator."""
        none = [MeasuredLink()] * (len(self.stages) - 1)
        forward, backward = self.forward or none, self.backward or none
        return [link.link(self.rows) for link in forward], [link.link(self.rows) for link in backward]


def read_times(path: Path) -> StageTimes:
    """Reads a JSON file of measured times; RunError if it cannot be read or holds something else."""
    with os_errors(f"{path}: cannot be read"), open_regular(path) as file:
        data = file.read()
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: is not JSON: {first_line(error)}") from error
    if isinstance(content, dict) and "traceEvents" in content:
        raise RunError(
            f"{path}: is a trace for Perfetto; give the times.json that `mlora train --trace` wrote"
        )
    try:
        times = StageTimes.model_validate(content)
    except ValidationError as error:
        raise RunError(f"{path}: {first_fault(error)}") from error
    for name, links in (("forward", times.forward), ("backward", times.backward)):
        if links and len(links) != len(times.stages) - 1:
            raise RunError(
                f"{path}: {name}: expected {len(times.stages) - 1} links for {len(times.stages)} stages, "
                f"got {len(links)}"
            )
    return times
