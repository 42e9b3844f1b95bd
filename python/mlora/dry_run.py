"""Memory of a stage before anything runs: the same code on fake tensors, which have shapes but no numbers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel

import mlora_ext
from mlora.crew import PartOptions, Source
from mlora.cut import Span, cut_model
from mlora.live_memory import LiveMemory
from mlora.model import take_apart
from mlora.optim_config import OptimConfig
from mlora.optimizer import Update
from mlora.part import StagePart
from mlora.pipeline.message import Message, Sort
from mlora.pipeline.order import ALONE
from mlora.pipeline.stage import Stage
from mlora.pretrained import skeleton
from mlora_ext.nn.routing import router_of

if TYPE_CHECKING:
    from peft import LoraConfig

_CUDA_BLOCK = 512  # the caching allocator counts in these


class DryStage:
    def __init__(self, source: Source, options: PartOptions, span: Span | None = None) -> None:
        if span is not None and span.stages == 1:
            span = None
        self._options, self._span = options, span
        model = (
            _bare(source)
            if isinstance(source, PreTrainedModel)
            else skeleton(os.fspath(source), options.dtype)
        )
        cut = None if span is None else cut_model(model, span)
        self._fake = FakeTensorMode()
        with self._fake:
            self.base_bytes = _fill(model, options.device, None if cut is None else cut.holds)
            base = take_apart(model, cut)
            mlora_ext.convert_model(model, {}, every_linear=True)
            router_of(model).accumulates = True
            if options.gradient_checkpointing:
                base.checkpoint_activations()
            self._part = StagePart(base, options.device)
        last = span is None or span.is_last
        stages = 1 if span is None else span.stages
        index = 0 if span is None else span.stage
        self._stage = Stage(self._part.module, index, stages, self._part.losses if last else None, self._part)

    def activations(self, adapters) -> int:
        names = list(adapters)
        with self._fake:
            for name, (lora, _) in adapters.items():
                self._part.create(
                    name, copy.deepcopy(lora), OptimConfig(learning_rate=1.0, total_steps=1), None, 0
                )
            try:
                return self._run({name: list(lengths) for name, (_, lengths) in adapters.items()})
            finally:
                for name in names:
                    self._part.remove(name)

    def _run(self, lengths):
        device = self._options.device
        rows = {name: sum(each) for name, each in lengths.items()}
        total = sum(rows.values())
        common = {
            "rows": {
                "names": tuple(lengths),
                "lengths": tuple(rows.values()),
                "row0": (0,) * len(rows),
                "sequences": tuple(n for each in lengths.values() for n in each),
            },
            "steps": [0] * len(rows),
            "updates": {},
            "ends": [],
            "measure": 0,
        }
        counts = [sum(n - 1 for n in each) for each in lengths.values()]
        trained = torch.zeros(sum(counts), dtype=torch.int32)
        targets = {"rows": trained, "targets": trained, "counts": counts, "scales": [1.0] * len(rows)}
        content = {"number": 1, "train": True, "place": ALONE, "common": common, "targets": targets}
        width = self._part.base.hidden_size
        states = lambda: torch.empty(total, width, dtype=self._options.dtype, device=device)
        if self._stage.index == 0:
            content["inputs"] = {"input_ids": torch.zeros(1, total, dtype=torch.int64, device=device)}
        else:
            content["activations"] = [states()]
        message = Message(Sort.FORWARD, content)
        if self._stage.is_last:
            done = self._stage.unit(message)
        else:
            self._stage.forward(message)
            back = {"number": 1, "place": ALONE, "gradients": [states()], "notes": [], "report": None}
            done = self._stage.backward(Message(Sort.BACKWARD, back))
        return done.content["notes"][0]["memory"]


def _bare(given: PreTrainedModel) -> PreTrainedModel:
    with init_empty_weights(include_buffers=False):
        model = type(given)(copy.deepcopy(given.config))
    dtypes = {name: p.dtype for name, p in given.named_parameters()}
    for name, p in model.named_parameters():
        p.data = p.data.to(dtypes[name])
    return model.eval()


def _fill(model: nn.Module, device: torch.device, holds) -> int:
    made: dict[int, Tensor] = {}
    mode = torch._C._unset_dispatch_mode if False else None
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or (holds is not None and not holds(f"{prefix}.{name}")):
                    continue
                if id(tensor) not in made:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    made[id(tensor)] = (
                        nn.Parameter(new, requires_grad=tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else new
                    )
                table[name] = made[id(tensor)]
    return sum(t.nbytes for t in made.values())
