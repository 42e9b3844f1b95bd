"""The model of ``pipeline`` in a run's config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mlora.config.strict import MOST, Strict, wrong_key


class PipelineConfig(Strict):
    """How the model is cut into stages, and what fills them.

    Each of ``stages`` processes holds consecutive decoder blocks. ``partition`` gives the number of blocks
    of each stage. Without it, the run measures the cut with the fastest slowest stage, and names it in its
    resolved config. ``lorapp`` keeps several groups of adapters under way at once; ``gpipe`` and ``1f1b``
    batch all adapters together. Each batch is cut into ``micro_batches``. There are ``replicas`` pipelines,
    each of which trains adapters of its own.
    """

    stages: int = Field(default=1, ge=1, le=4096)
    schedule: Literal["lorapp", "gpipe", "1f1b"] = "lorapp"
    micro_batches: int = Field(default=1, ge=1, le=MOST)
    partition: list[int] | None = None
    replicas: int = Field(default=1, ge=1, le=4096)

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.stages * self.replicas

    @model_validator(mode="after")
    def _partition(self) -> PipelineConfig:
        if self.partition is not None and len(self.partition) != self.stages:
            raise wrong_key(
                "partition",
                f"must have one number per stage: stages is {self.stages}, got {len(self.partition)} numbers"
                "; remove it to have the best cut measured",
            )
        if self.partition is not None and min(self.partition) < 1:
            raise wrong_key("partition", f"each stage needs at least one block, got {self.partition}")
        return self
