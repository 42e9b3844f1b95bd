"""Loads a base model, whole or one stage of it: checked, frozen and converted."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

import mlora_ext
from mlora.model.base_model import BaseModel, take_apart
from mlora.model.cut import Cut, Span, cut_model
from mlora.model.pretrained import load_whole
from mlora.model.probe import check_packing
from mlora.model.stage_weights import load_stage, stage_to


def load_base(
    source: str | Path | PreTrainedModel, device: torch.device, dtype: torch.dtype, span: Span | None = None
) -> BaseModel:
    """Loads a causal language model, checks that packed rows give its logits, freezes and converts it.

    Args:
        source: a folder, a hub id, or a model of this dtype, which is converted in place.
        span: the stage to load and check without the rest; default: the whole model.

    Raises:
        ValueError: it cannot be loaded or cut, or packed rows give other logits; in one line.
    """
    model, cut = _get(source, device, dtype, None if span is None or span.stages == 1 else span)
    given = next(p.dtype for p in model.parameters() if cut is None or not p.is_meta)
    if given != dtype:
        raise ValueError(f"base_model: expected weights of dtype {dtype}, got {given}; pass dtype={given}")
    if cut is None:
        model.to(device)  # type: ignore[arg-type]
    else:
        stage_to(model, device)
    base = take_apart(model, cut)
    check_packing(base)
    mlora_ext.convert_model(model, {}, every_linear=True)
    return base


def _get(
    source: str | Path | PreTrainedModel, device: torch.device, dtype: torch.dtype, span: Span | None
) -> tuple[PreTrainedModel, Cut | None]:
    if isinstance(source, PreTrainedModel):
        return source, None if span is None else cut_model(source, span)
    if span is None:
        return load_whole(str(source), dtype), None
    cut = load_stage(str(source), span, device, dtype)
    return cut.model, cut
