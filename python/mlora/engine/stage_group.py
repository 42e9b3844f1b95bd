"""The stages of an engine, and the pipeline over them."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from transformers import AutoConfig, PreTrainedModel

from mlora.cluster.world import World
from mlora.config.sections import QuantizationConfig
from mlora.engine.full_worker import FullWorker
from mlora.engine.stage_worker import StageWorker
from mlora.model.base_info import check_base
from mlora.model.cut import BlockSpan
from mlora.model.load import load_base, load_trained
from mlora.offload.options import IN_MEMORY, OffloadOptions
from mlora.pipeline import Driver, Pipeline, StageProcess, connect_neighbours
from mlora_ext.routing.router import router_of

Source = str | os.PathLike[str] | PreTrainedModel


@dataclass(frozen=True)
class StageOptions:
    """How each stage holds its piece of the base.

    Attributes:
        dtype: of the base's weights.
        gradient_checkpointing: recompute blocks in backward.
        frozen_weight: name of the kind of frozen weights; see `mlora_ext.set_frozen_weights`.
        offload: what of the base stays on disk.
        trained: whether the base's own weights are trained, and there are no adapters.
        quantization: how a plain checkpoint is quantised; None: it stays as it is.
    """

    device: torch.device
    dtype: torch.dtype
    gradient_checkpointing: bool = False
    frozen_weight: str = "plain"
    offload: OffloadOptions = IN_MEMORY
    trained: bool = False
    quantization: QuantizationConfig | None = None


@dataclass(frozen=True, eq=False)
class StageGroup:
    """Stages that are ready to work.

    Attributes:
        driver: feeds the first stage.
        first: the first stage, in this process.
        last: the last stage, if it is in this process.
        blocks: number of decoder blocks of each stage; may be 0 for a single stage.
        replicas: number of pipelines; each has all stages.
        spread: whether each stage is a process of its own.
    """

    driver: Driver
    first: StageWorker
    blocks: Sequence[int]
    replicas: int = 1
    spread: bool = False
    last: StageWorker | None = None


def stage_group_of_threads(
    source: Source,
    stages: int | Sequence[int],
    options: StageOptions,
    schedule: str,
    *,
    in_flight: int | None = None,
    trace: int = 0,
) -> StageGroup:
    """Makes all stages in this process; those after the first are threads.

    A model given as `source` is converted in place for one stage, and copied for each of several. `stages` is
    the blocks of each stage, or a number of stages. `trace` is the number of spans to keep of each stage.
    """
    spans = spans_of(stages, count_blocks(source)) if stages != 1 else [None]
    copies = len(spans) > 1 and isinstance(source, PreTrainedModel)
    parts = [
        make_worker(copy.deepcopy(source) if copies else source, span, _on_its_device(options, stage))
        for stage, span in enumerate(spans)
    ]
    driver = Pipeline(parts, schedule, in_flight=in_flight, trace=trace)
    blocks = [0 if span is None else span.last - span.first for span in spans]
    return StageGroup(driver, parts[0], blocks, last=parts[-1])


def _on_its_device(options: StageOptions, stage: int) -> StageOptions:
    """Gives the stages of one process its GPUs in turn, unless the options name one."""
    if options.device != torch.device("cuda"):
        return options
    return replace(options, device=torch.device("cuda", stage % torch.cuda.device_count()))


def stage_of_this_process(
    source: Source,
    blocks: Sequence[int],
    options: StageOptions,
    schedule: str,
    world: World,
    *,
    replicas: int = 1,
    in_flight: int | None = None,
    trace: int = 0,
) -> tuple[StageWorker, StageProcess]:
    """Makes this process's stage of a pipeline over processes; all of them must call it.

    Loads only the stage's weights from a folder or hub id; cuts a model in place. NCCL carries tensors if
    each process has its own GPU, TCP otherwise. The first process feeds its `StageProcess`; the others
    `serve`.
    """
    count = len(blocks)
    stage = world.rank % count
    part = make_worker(source, spans_of(blocks, count_blocks(source))[stage], options)
    places = world.gather("devices", [world.process.host, str(options.device)])
    of_their_own = len({tuple(place) for place in places}) == len(places)
    nccl = of_their_own and all(device.startswith("cuda") for _, device in places)
    device = options.device if nccl else None
    neighbours = connect_neighbours(world, replicas=replicas, nccl=device)
    process = StageProcess(
        part,
        stage,
        count,
        neighbours,
        schedule,
        device=options.device,
        in_flight=in_flight,
        trace=trace,
        name=f"stage {world.rank}",
    )
    return part, process


def make_worker(source: Source, span: BlockSpan | None, options: StageOptions) -> StageWorker:
    """Loads a stage; `span=None` is the whole model. Cuts and converts a given model in place."""
    source = source if isinstance(source, PreTrainedModel) else os.fspath(source)
    activations = "recompute" if options.gradient_checkpointing else options.offload.activations
    if activations not in ("auto", "keep", "recompute", "swap"):
        raise ValueError(f"offload.activations: expected auto, keep, recompute or swap, got {activations!r}")
    if activations in ("auto", "swap") and options.device.type != "cpu":
        where = options.device
        raise ValueError(f"offload.activations: {activations} serves the CPU so far, got device {where}")
    if options.trained:
        base = load_trained(source, options.device, options.dtype, options.offload)
        base.wrap_blocks(options.offload, activations, converted=False)
        return FullWorker(base, options.device, options.offload)
    base = load_base(source, options.device, options.dtype, span, options.offload, options.quantization)
    router_of(base.model).accumulates = True
    if activations in ("auto", "swap") or options.offload.base == "disk":
        base.wrap_blocks(options.offload, activations, converted=True)
    elif activations == "recompute":
        base.checkpoint_activations()
    if options.frozen_weight != "plain":
        base.set_frozen_weights(options.frozen_weight)
    return StageWorker(base, options.device, options.offload)


def count_blocks(source: Source) -> int:
    """Returns the number of a model's decoder blocks, from its config."""
    if isinstance(source, PreTrainedModel):
        config = source.config
    else:
        check_base(os.fspath(source))
        config = AutoConfig.from_pretrained(os.fspath(source), trust_remote_code=False)
    return int(config.get_text_config().num_hidden_layers)


def spans_of(stages: int | Sequence[int], blocks: int) -> list[BlockSpan]:
    """Returns the stages of a model; an int shares the blocks evenly, the first stages take the remainder."""
    if isinstance(stages, int):
        if not 1 <= stages <= blocks:
            raise ValueError(f"stages: expected 1 to {blocks}, as many as the model has blocks, got {stages}")
        stages = [blocks // stages + (index < blocks % stages) for index in range(stages)]
    if not stages or min(stages) < 1 or sum(stages) != blocks:
        raise ValueError(f"stages: expected blocks of each that add up to {blocks}, got {list(stages)}")
    ends = [0, *accumulate(stages)]
    return [BlockSpan(index, len(stages), a, b) for index, (a, b) in enumerate(pairwise(ends))]
