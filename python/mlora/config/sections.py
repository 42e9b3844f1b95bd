"""The models of ``scheduler``, ``pipeline``, ``offload`` and ``quantization`` in a run's config."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from mlora.config.aliases import nearest
from mlora.config.strict import MOST, Location, ResolvedPath, Strict, wrong_key, wrong_keys
from mlora.errors import first_fault, unknown_value
from mlora.offload.options import SLOTS, OffloadOptions


def parse_size(value: Any) -> int:
    """Returns a size in bytes, rounded down, from a number or a text such as ``8GiB``, ``500 MB``, ``2G``."""
    size = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?)(i?)B?", str(value).strip(), re.IGNORECASE)
    if isinstance(value, str) and match is not None:
        power = " KMGT".index(match[2].upper() or " ")
        size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not 1 <= size <= sys.float_info.max:
        raise ValueError(f"must be a size such as 8GiB or 500MB, got {value!r}")
    return math.floor(size)


def _checked_size(value: Any) -> Any:
    size = None if value is None else parse_size(value)
    return size if isinstance(value, float) else value


Size = Annotated[
    int | str,
    BeforeValidator(_checked_size),
    WithJsonSchema(
        {
            "title": "size",
            "anyOf": [
                {"type": "number", "minimum": 1},
                {"type": "string", "pattern": r"^\s*[0-9]*\.?[0-9]+\s*[KMGTkmgt]?[iI]?[bB]?\s*$"},
            ],
        }
    ),
]
"""Bytes, as they were written: a number, or a text that `parse_size` reads."""


class SchedulerConfig(Strict):
    """Which tasks run at once: as many as fit in memory; without a limit, all of them.

    ``memory_limit`` bounds the resident memory of a stage's process on a CPU, and what its allocator holds
    on a GPU. ``policy`` is the order of admission: ``fcfs`` (higher priority, then earlier arrival) or
    ``shortest_first`` (higher priority, then least work left). ``placement`` chooses which tasks share
    a group of a pipeline: ``token_balanced`` or ``in_order``.
    """

    memory_limit: Size | None = Field(
        default=None,
        description="Most memory of each stage's process (CPU), or of its allocator (GPU): bytes, or a "
        "size such as `8GiB` or `500MB`; null: no limit.",
    )
    policy: Literal["fcfs", "shortest_first"] = Field(
        default="fcfs",
        description="Order of admission within a priority: `fcfs` by arrival, `shortest_first` by the "
        "work that is left.",
    )
    placement: Literal["token_balanced", "in_order"] = Field(
        default="token_balanced",
        description="Which adapters share a group of the pipeline: `token_balanced` by tokens, `in_order`"
        " as they are listed.",
    )

    @property
    def limit_bytes(self) -> int | None:
        """``memory_limit`` in bytes."""
        return None if self.memory_limit is None else parse_size(self.memory_limit)


class PipelineConfig(Strict):
    """How the model is cut into stages, and what fills them.

    Each of ``stages`` processes holds consecutive decoder blocks. ``partition`` gives the number of blocks
    of each stage. Without it, the run measures the cut with the fastest slowest stage, and names it in its
    resolved config. ``lorapp`` keeps several groups of adapters under way at once; ``gpipe`` and ``1f1b``
    batch all adapters together. Each batch is cut into ``micro_batches``. There are ``replicas`` pipelines,
    each of which trains adapters of its own.
    """

    stages: int = Field(
        default=1, ge=1, le=4096, description="Processes over which the decoder blocks are spread."
    )
    schedule: Literal["lorapp", "gpipe", "1f1b"] = Field(
        default="lorapp",
        description="`lorapp` keeps several groups of adapters under way; `gpipe` and `1f1b` batch all "
        "adapters together.",
    )
    micro_batches: int = Field(default=1, ge=1, le=MOST, description="Pieces into which each batch is cut.")
    partition: list[int] | None = Field(
        default=None,
        description="Decoder blocks of each stage; null: the cut that is measured to be fastest.",
    )
    replicas: int = Field(
        default=1, ge=1, le=4096, description="Number of pipelines, each of which trains adapters of its own."
    )

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


Method = Literal["lora", "full"]
Place = Literal["device", "host", "disk"]
"""The memory of the device that computes, the machine's memory (on a CPU the same), or files."""


class OffloadConfig(Strict):
    """Where parts of a run live while they are not used. No choice changes a result.

    ``base``: with ``disk``, the linear weights of the base model's blocks stay in files, and ``slots`` blocks
    at a time are in memory. ``optimizer``: the optimizer's states. ``activations``: what a block keeps for
    backward. Scratch files are striped over ``folders``; without any they are in the system's folder for
    temporary files. ``host_memory`` and ``device_memory`` bound what a plan may use.
    """

    base: Place = Field(
        default="device",
        description="Where the linear weights of the blocks are; `host` on a CPU is the same as `device`.",
    )
    optimizer: Place = Field(
        default="device", description="Where the optimizer's states are; `disk` needs `method: full`."
    )
    activations: Literal["auto", "keep", "recompute", "swap"] = Field(
        default="keep",
        description="What becomes of what a block needs for backward; `auto` plans it for each block.",
    )
    folders: list[ResolvedPath] = Field(
        default_factory=list,
        description="Folders for scratch files, which are striped over them; they must exist; empty: the "
        "system's folder for temporary files.",
    )
    host_memory: Size | None = Field(
        default=None,
        description="Most memory of the machine that a plan of `activations: auto` may use; null: what is"
        " free.",
    )
    device_memory: Size | None = Field(
        default=None,
        description="Most memory of the device that a plan of `activations: auto` may use; null: what is "
        "free.",
    )
    slots: int = Field(
        default=SLOTS, ge=2, le=MOST, description="Blocks in memory at once with `base: disk`."
    )

    @property
    def options(self) -> OffloadOptions:
        """The same for an `Engine`."""
        return OffloadOptions(
            base=self.base,
            optimizer=self.optimizer,
            activations=self.activations,
            folders=tuple(self.folders),
            slots=self.slots,
            device_memory=self.device_bytes,
        )

    @property
    def device_bytes(self) -> int | None:
        """``device_memory`` in bytes; on a CPU, where both are one memory, the smaller of both."""
        given = [parse_size(size) for size in (self.device_memory, self.host_memory) if size is not None]
        return min(given, default=None)


QUANTIZATIONS: dict[str, tuple[str, ...]] = {
    "bnb-nf4": ("double_quant", "compute_dtype"),
    "bnb-fp4": ("double_quant", "compute_dtype"),
    "bnb-int8": (),
    "torchao-int8": ("group_size",),
    "torchao-int4": ("group_size",),
    "torchao-float8": (),
}
"""The options of each method of quantisation."""


LOAD_IN = {"load_in_4bit": "bnb-nf4", "load_in_8bit": "bnb-int8"}
"""Keys of other tools that name a method."""


class QuantizationConfig(Strict):
    """The base model is quantised while it is read, with ``method``.

    ``double_quant``: the scales of 4-bit numbers are quantised, too (QLoRA). ``compute_dtype``: of the
    products with 4-bit weights; without it, that of the run. ``group_size``: the neighbouring numbers that
    share a scale; without it, a row (int8) or 32 (int4).
    """

    method: str = Field(
        description="Format of the weights, from bitsandbytes (`bnb-`) or torchao (`torchao-`)."
    )
    double_quant: bool = Field(
        default=False,
        description="Whether the scales of 4-bit numbers are quantised, too (QLoRA); for `bnb-nf4` and "
        "`bnb-fp4`.",
    )
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="Type in which products with 4-bit weights are computed; null: that of the run.",
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="Neighbouring numbers that share a scale; null: a row (`torchao-int8`) or 32 "
        "(`torchao-int4`).",
    )

    @model_validator(mode="before")
    @classmethod
    def _no_other_tool(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key in LOAD_IN:
                hint = "remove it" if "method" in value else f"write `method: {LOAD_IN[key]}` in its place"
                raise wrong_key(key, f"unknown key; {hint}")
        return value

    @field_validator("method")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in QUANTIZATIONS:
            raise ValueError(unknown_value(value, list(QUANTIZATIONS)))
        return value

    @model_validator(mode="after")
    def _options_fit(self) -> QuantizationConfig:
        given = {"double_quant": self.double_quant, "compute_dtype": self.compute_dtype}
        asked = [key for key, value in {**given, "group_size": self.group_size}.items() if value]
        faults: dict[Location, str] = {
            (key,): f"is not an option of {self.method}; remove it"
            for key in asked
            if key not in QUANTIZATIONS[self.method]
        }
        if faults:
            raise wrong_keys(faults)
        return self


def checked_quantization(given: QuantizationConfig | Mapping[str, Any] | None) -> QuantizationConfig | None:
    """Returns what a caller in Python gave as ``quantization``, checked. ValueError names the key."""
    if given is None or isinstance(given, QuantizationConfig):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f"quantization: expected keys and values such as {{'method': 'bnb-nf4'}}, got {given!r}"
        )
    known = list(QuantizationConfig.model_fields)
    for key in given:
        if key not in known and key not in LOAD_IN:
            raise ValueError(f"quantization.{key}: unknown key; {nearest(str(key), known)}")
    try:
        return QuantizationConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"quantization.{first_fault(error)}") from error
