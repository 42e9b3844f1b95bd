"""The stages of an engine, and the pipeline over them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mlora.model import load_base
from mlora.part import StagePart
from mlora.pipeline import Driver, Pipeline
from mlora_ext.nn.routing import router_of


@dataclass(frozen=True, eq=False)
class Crew:
    """Stages that are ready to work.

    Attributes:
        driver: feeds the first one.
        first: the first one, in this process.
        stages: their number.
    """

    driver: Driver
    first: StagePart
    stages: int


def crew_of(
    base_model: str | os.PathLike[str] | PreTrainedModel,
    stages: int | Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    schedule: str,
    gradient_checkpointing: bool,
    pack_base: bool,
) -> Crew:
    part = make_part(base_model, device, dtype, gradient_checkpointing=gradient_checkpointing, pack_base=pack_base)
    return Crew(Pipeline([part.module], schedule, part.losses, hooks=[part]), part, 1)


def make_part(
    base_model: str | os.PathLike[str] | PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    gradient_checkpointing: bool,
    pack_base: bool,
) -> StagePart:
    source = base_model if isinstance(base_model, PreTrainedModel) else os.fspath(base_model)
    base = load_base(source, device, dtype)
    router_of(base.model).accumulates = True
    if gradient_checkpointing:
        base.checkpoint_activations()
    if pack_base:
        base.pack_weights()
    return StagePart(base, device)
