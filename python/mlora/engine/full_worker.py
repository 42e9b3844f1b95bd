"""One process's part of an engine that trains a model's own weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlora.data.micro_batch import MicroBatch
from mlora.engine.stage_worker import StageWorker
from mlora.model.base_model import BaseModel
from mlora.model.cut import find_blocks
from mlora.model.export import export_model
from mlora.objectives.token_losses import Head
from mlora.offload.options import STATE_BYTES, OffloadOptions
from mlora.offload.planner.workload import Update as UpdateKind
from mlora.optim.groups import layer_norms_among
from mlora.optim.optim_config import OptimConfig
from mlora.optim.optimizer import Optimizer, Shapes, elements
from mlora.optim.step_rule import Update
from mlora.pipeline import verb
from mlora.pipeline.trace import Trace


class FullAdamW(Optimizer):
    """AdamW on fp32 weights and moments of all of a model's Parameters, in memory or on disk.

    If the update is known before the backward pass, each Parameter is updated as soon as its gradient is
    there (LoHan, arXiv 2403.06504, section IV-C). Otherwise the update follows the backward pass.

    Args:
        base: holds the Parameters.
        config: the optimizer's settings.
        offload: where states are.

    Attributes:
        planned: the update that gradients get when they come; None = they wait for `apply`.
        drops: gradients go at once, because their micro-batch is only watched.
    """

    def __init__(self, base: BaseModel, config: OptimConfig, offload: OffloadOptions) -> None:
        from mlora.offload.out_of_core import OutOfCoreAdamW  # needs the compiled library

        named = dict(base.model.named_parameters())
        super().__init__(named, config)
        self.spare_layer_norms(layer_norms_among(named.values(), base.model))
        self._places = {name: place for place, name in enumerate(named)}
        self.planned: Update | None = None
        self.drops = False
        self._named = named
        self._squares: float | None = None  # of an update that is made already
        self.adamw = OutOfCoreAdamW(
            named,
            base.disk(offload),
            on_disk=offload.optimizer == "disk",
            stream=base.stream,
        )
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._gradient_came, name))
            for name, parameter in named.items()
        ]

    @staticmethod
    def state_bytes(shapes: Shapes) -> int:
        """Returns the bytes of fp32 weights and moments."""
        return STATE_BYTES * elements(shapes)

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        """Updates Parameters in the order of a backward pass."""
        names = list(self._named)
        for i in reversed(index):
            self._submit(names[i], Update(learning_rate, scale, True))
        self.adamw.finish()

    def squares(self) -> Tensor:
        """Returns the sum of the squares of the gradients, also of those that are used up: `[]` fp64."""
        if self.planned is None:
            return super().squares()
        for name in reversed(self._named):  # what accumulated and had no part in the last micro-batch
            if self._named[name].grad is not None:
                self._submit(name, self.planned)
        self._squares, self.planned = self.adamw.finish(), None
        return torch.tensor(self._squares, dtype=torch.float64, device="cpu")

    def apply(self, update: Update) -> None:
        """Makes an update, unless it was made during the backward pass; drops the gradients."""
        if self._squares is None:
            super().apply(update)
        else:
            self._squares = None
            self.steps += 1

    def close(self) -> None:
        """Gives the Parameters back."""
        for hook in self._hooks:
            hook.remove()
        self.adamw.close()

    def _gradient_came(self, name: str, _: Tensor) -> None:
        if self.drops:
            self._named[name].grad = None
        elif self.planned is not None:
            self._submit(name, self.planned)

    def _submit(self, name: str, update: Update) -> None:
        from mlora.offload.updates import AdamWStep

        config = self.config
        step = AdamWStep(
            lr=update.learning_rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_epsilon,
            weight_decay=self.weight_decay([self._places[name]]),
            step=self.adamw.counts[name] + 1,
            scale=update.scale,
        )
        self.adamw.submit(name, step)


class FullWorker(StageWorker):
    """Trains all weights of a model for one task, instead of adapters."""

    def __init__(self, base: BaseModel, device: torch.device, offload: OffloadOptions) -> None:
        super().__init__(base, device, offload)
        self._trace: Trace | None = None

    def traced(self, trace: Trace) -> None:
        super().traced(trace)
        self._trace = trace

    def own(self, name: str, optim: OptimConfig, *, trained: bool = True) -> None:
        """Takes charge of the model's weights for a task."""
        optimizer = self._optimizers[name] = FullAdamW(self.base, optim, self.offload)
        if self._trace is not None:
            optimizer.adamw.on_span(self._trace.add_beside)

    @verb
    def update(self, updates: Mapping[str, Update]) -> dict[str, str]:
        """Makes the task's update; what fails there, such as the disk, concerns the whole run."""
        for name, update in updates.items():
            self._optimizers[name].apply(update)
            self._changed(name)
        return {}

    @verb
    def remove(self, name: str) -> None:
        """Forgets the task; the weights stay as they are."""
        self._full(name).close()
        del self._optimizers[name]
        self._in_flight.pop(name, None)

    @verb
    def export(self, folder: str) -> None:
        """Writes the stage's weights; see `export_model`."""
        export_model(self.base, Path(folder))

    def forward(self, given: Sequence[Tensor], batch: MicroBatch) -> Tensor:
        """Makes the updates decided since the last forward, and runs a micro-batch; returns `[T, D]`."""
        assert batch.start is None, "there are no adapters to initialise"
        assert batch.silent is None, "no objective here has rows without gradient"
        self.update(batch.updates)
        if torch.is_grad_enabled():
            self._latest = batch.names
            for name in batch.names:
                self._in_flight[name] = self._in_flight.get(name, 0) + 1
                self._full(name).planned = batch.planned.get(name)
        return self.base.hidden(batch.input_ids, *batch.places(self.device), *given)

    @verb
    def watch(self) -> None:
        super().watch()
        for name in self._optimizers:
            self._full(name).drops = True

    @verb
    def forecast(self, tokens: int, in_flight: int, sharing: int) -> dict[str, Any] | None:
        for name in self._optimizers:
            self._full(name).drops = False
        return super().forecast(tokens, in_flight, sharing)

    def _changed(self, name: str) -> None:
        """Does nothing: autograd itself notices changed weights."""

    def _full(self, name: str) -> FullAdamW:
        optimizer = self._optimizers[name]
        assert isinstance(optimizer, FullAdamW)
        return optimizer

    def _trained_numbers(self) -> list[int]:
        if self.offload.optimizer != "disk":
            return []
        blocks = self.base.model.get_submodule(find_blocks(self.base.model)[0]).children()
        numbers = [sum(p.numel() for p in block.parameters()) for block in blocks]
        return [*numbers, sum(p.numel() for p in self.base.model.parameters()) - sum(numbers)]

    def _update_kind(self) -> UpdateKind:
        active = all(self._full(name).config.max_grad_norm == 0 for name in self._optimizers)
        return "active" if active else "after"

    def _frozen_head(self) -> Head | None:
        return None

    def _logits(self, output: Tensor) -> Tensor:
        return self.base.logits(output)

    @verb
    def state(self, name: str) -> dict[str, Any]:
        """Returns copies of open gradients; `save_file` writes the weights and moments."""
        named = self.base.model.named_parameters()
        return {"gradients": {key: p.grad.clone() for key, p in named if p.grad is not None}}

    @verb
    def load(self, name: str, state: Mapping[str, Any], updates: int, seed: int) -> None:
        """Takes over weights and moments of a file, and open gradients."""
        optimizer = self._full(name)
        optimizer.drop_gradients()
        optimizer.adamw.load_file(Path(state["file"]), state["counts"])
        optimizer.steps = updates
        for key, parameter in self.base.model.named_parameters():
            if key in state["gradients"]:
                parameter.grad = state["gradients"][key].to(parameter.dtype).clone()

    @verb
    def save_state(self, name: str, file: str) -> dict[str, Any]:
        """Writes weights and moments to a file; returns its CRC-32 and the updates made of each Parameter."""
        adamw = self._full(name).adamw
        return {"crc32": adamw.save_file(Path(file)), "counts": adamw.counts}
