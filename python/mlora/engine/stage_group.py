"""The stages of an engine, and the pipeline over them."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from transformers import AutoConfig, PreTrainedModel

import mlora_ext
from mlora.cluster.world import World
from mlora.engine.stage_worker import StageWorker
from mlora.model.cut import Span
from mlora.model.hub import check_base
from mlora.model.load import load_base
from mlora.model.pretrained import skeleton
from mlora.pipeline import Driver, Pipeline, StageProcess, connect_neighbours
from mlora_ext.nn.routing.router import router_of

Source = str | os.PathLike[str] | PreTrainedModel


@dataclass(frozen=True)
class StageOptions:
    """How each stage holds its piece of the base.

    Attributes:
        device: where.
        dtype: of the base's weights.
        gradient_checkpointing: recompute blocks in backward.
        pack_base: keep the weights packed for oneDNN too.
    """

    device: torch.device
    dtype: torch.dtype
    gradient_checkpointing: bool = False
    pack_base: bool = False


@dataclass(frozen=True, eq=False)
class StageGroup:
    """Stages that are ready to work.

    Attributes:
        driver: feeds the first one.
        first: the first one, in this process.
        blocks: decoder blocks of each; of a single stage it need not be known.
        replicas: how many pipelines there are, of as many stages each.
        source: folder or hub id of the base, where there are several.
        spread: whether each stage is a process of its own.
    """

    driver: Driver
    first: StageWorker
    blocks: Sequence[int]
    replicas: int = 1
    source: str = ""
    spread: bool = False

    @property
    def stages(self) -> int:
        """Their number in each pipeline."""
        return len(self.blocks)

    def skeleton(self) -> PreTrainedModel:
        """The base without any weight, converted: adapters on it take no memory."""
        model = skeleton(self.source, torch.float32)
        mlora_ext.convert_model(model, {}, every_linear=True)
        return model


def stage_group_of_threads(
    source: Source,
    stages: int | Sequence[int],
    options: StageOptions,
    schedule: str,
    *,
    in_flight: int | None = None,
    trace: int = 0,
) -> StageGroup:
    """Stages in this process; those after the first are threads.

    Args:
        source: a folder, a hub id, or a model; with one stage it is converted in place, with several each
            stage is cut from a copy.
        stages: blocks of each stage, or a number of stages that share them alike.
        options: how each stage holds its piece.
        schedule: `lorapp`, `1f1b` or `gpipe`.
        in_flight: the most micro-batches under way at once; see `Pipeline`.
        trace: spans to keep of each stage.

    Raises:
        ValueError: if the model cannot be loaded, cut or trained on packed rows.
    """
    spans = spans_of(stages, count_blocks(source)) if stages != 1 else [None]
    copies = len(spans) > 1 and isinstance(source, PreTrainedModel)
    parts = [
        make_worker(copy.deepcopy(source) if copies else source, span, _on_its_device(options, stage))
        for stage, span in enumerate(spans)
    ]
    modules = [part.module for part in parts]
    driver = Pipeline(modules, schedule, parts[-1].losses, hooks=parts, in_flight=in_flight, trace=trace)
    return StageGroup(driver, parts[0], [0 if span is None else span.last - span.first for span in spans])


def _on_its_device(options: StageOptions, stage: int) -> StageOptions:
    """Stages of one process take its GPUs in turn, unless one of them is named."""
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
    """This process's stage of a pipeline over processes; all of them call it.

    Args:
        source: a folder or a hub id, of which only the stage's weights are loaded, or a model, which is cut
            in place.
        blocks: of each stage.
        options: how each stage holds its piece.
        schedule: `lorapp`, `1f1b` or `gpipe`.
        world: the processes.
        replicas: pipelines that they form.
        in_flight: the most micro-batches under way at once; see `Pipeline`.
        trace: spans to keep.

    Returns:
        The stage, and its process's place in the pipeline: the first one feeds it by `FirstStage`, the others
        `serve`. NCCL carries tensors where each process has a GPU of its own, TCP elsewhere.

    Raises:
        ValueError: if the model cannot be loaded, cut or trained on packed rows.
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
        part.module,
        stage,
        count,
        neighbours,
        schedule,
        part.losses,
        device=options.device,
        hooks=part,
        in_flight=in_flight,
        trace=trace,
        name=f"stage {world.rank}",
    )
    return part, process


def make_worker(source: Source, span: Span | None, options: StageOptions) -> StageWorker:
    """Load a stage.

    Args:
        source: a folder, a hub id, or a model, which is cut and converted in place.
        span: the stage; None = the whole model.
        options: how it holds its piece.

    Raises:
        ValueError: if the model cannot be loaded, cut or trained on packed rows.
    """
    source = source if isinstance(source, PreTrainedModel) else os.fspath(source)
    base = load_base(source, options.device, options.dtype, span)
    router_of(base.model).accumulates = True
    if options.gradient_checkpointing:
        base.checkpoint_activations()
    if options.pack_base:
        base.pack_weights()
    return StageWorker(base, options.device)


def count_blocks(source: Source) -> int:
    """The number of a model's decoder blocks, from its config.

    Raises:
        ValueError: if there is no such model.
    """
    if isinstance(source, PreTrainedModel):
        config = source.config
    else:
        check_base(os.fspath(source))
        config = AutoConfig.from_pretrained(os.fspath(source))
    return int(config.get_text_config().num_hidden_layers)


def spans_of(stages: int | Sequence[int], blocks: int) -> list[Span]:
    """The stages of a model.

    Args:
        stages: blocks of each stage, or a number of stages that share them alike, the first ones one more
            where it does not come out even.
        blocks: of the model.

    Raises:
        ValueError: if a stage would have no block, or they are not as many as the model's.
    """
    if isinstance(stages, int):
        if not 1 <= stages <= blocks:
            raise ValueError(f"stages: expected 1 to {blocks}, as many as the model has blocks, got {stages}")
        stages = [blocks // stages + (index < blocks % stages) for index in range(stages)]
    if not stages or min(stages) < 1 or sum(stages) != blocks:
        raise ValueError(f"stages: expected blocks of each that add up to {blocks}, got {list(stages)}")
    ends = [0, *accumulate(stages)]
    return [Span(index, len(stages), a, b) for index, (a, b) in enumerate(pairwise(ends))]
