"""The contender `torch.distributed.pipelining`: its own GPipe and 1F1B.

Its stages hold the same modules as ours, and its micro-batches are as large. Fastest settings: no outputs
collected (`return_outputs=False`), gradients not scaled, no barrier between flushes, losses not read inside a
turn. With `joint` the micro-batches of all adapters are one flush, after which all are updated: a step of
every adapter waits for all others, and for the flush's bubble.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mlora.pipeline.trace import Span
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipeline.turn import Case, Item, Turn, rounds

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class TracedStage(PipelineStage):
    """Notes when it computes; `spans` counts micro-batches on over all flushes."""

    spans: list[Span]
    first_number: int

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic_ns()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note("forward", fwd_chunk_id, begin)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic_ns()
        output = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._note("backward", bwd_chunk_id, begin)
        return output

    def loss_ended(self) -> None:
        """The loss belongs to the forward before it."""
        self.spans[-1] = self.spans[-1]._replace(end=time.monotonic_ns())

    def _note(self, sort: str, index: int, begin: int) -> None:
        number = self.first_number + index
        self.spans.append(Span("compute", sort, number, begin, time.monotonic_ns()))


class TorchPipeline:
    """One process's stage.

    Args:
        case: what it runs.
        module: the stage.
        trained: its adapters.
        batch: ids of a micro-batch.
        loss: `(output, ids) -> scalar`.
        group: of all processes, for it alone.
        place: stage and D.
    """

    def __init__(
        self,
        case: Case,
        module: Any,
        trained: Any,
        batch: Callable[[Item], Tensor],
        loss: Callable[[Tensor, Tensor], Tensor],
        group: dist.ProcessGroup,
        place: tuple[int, int],
    ) -> None:
        self._case, self._module, self._trained, self._batch, self._loss = case, module, trained, batch, loss
        self._is_first, self._is_last = place[0] == 0, place[0] == place[1] - 1
        ids = batch(Item(0, 0, 0))
        hidden = torch.empty(*ids.shape, module.norm.weight.numel(), requires_grad=True)
        logits = torch.empty(*ids.shape, module.vocabulary, requires_grad=True)
        self._stage = TracedStage(
            module,
            *place,
            torch.device("cpu"),
            input_args=ids if self._is_first else hidden,
            output_args=logits if self._is_last else hidden,
            group=group,
        )
        self._together = range(case.adapters) if case.joint else [0]
        count = case.micro_batches * len(self._together)
        make = _SCHEDULES[case.schedule]
        self._schedule = make(self._stage, count, loss_fn=self._mean_loss, scale_grads=False)

    def turn(self, steps: int) -> Turn:
        """Run so many steps of each adapter."""
        turn = Turn(ended=[0.0] * self._case.adapters)
        self._stage.spans = turn.spans
        kept: list[Tensor] = []
        if self._case.joint:
            for step in range(steps):
                self._flush(turn, kept, list(self._together), step)
        else:
            for adapter, step in rounds(self._case, steps):
                self._flush(turn, kept, [adapter], step)
        if self._is_last:
            values = [float(loss) for loss in kept]
            turn.losses = list(zip(turn.items, values, strict=True))
        return turn

    def _flush(self, turn: Turn, kept: list[Tensor], adapters: list[int], step: int) -> None:
        case = self._case
        items = [Item(k, step, index) for k in adapters for index in range(case.micro_batches)]
        self._stage.first_number = len(turn.items) + 1
        turn.items += items
        ids = [self._batch(item) for item in items]
        options: dict[str, Any] = {"return_outputs": False}
        if case.joint:
            owners = torch.tensor([item.adapter for item in items])
            options["adapter"] = owners.repeat_interleave(len(ids[0]))
        else:
            self._module.choice.adapter = adapters[0]
        whole = torch.cat(ids)
        if self._is_last:
            losses: list[Tensor] = []
            given = (whole,) if self._is_first else ()
            self._schedule.step(*given, target=whole, losses=losses, **options)
            kept += [loss.detach() * case.micro_batches for loss in losses]
        else:
            self._schedule.step(whole, **options) if self._is_first else self._schedule.step(**options)
        self._update(turn, adapters, case.micro_batches)

    def _update(self, turn: Turn, adapters: list[int], size: int) -> None:
        for place, adapter in enumerate(adapters, 1):
            begin, number = time.monotonic_ns(), self._stage.first_number - 1 + place * size
            self._trained.step(adapter)
            turn.spans.append(Span("compute", "optimizer", number, begin, time.monotonic_ns()))
            turn.ended[adapter] = time.monotonic()

    def _mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self._loss(output, target) / self._case.micro_batches
        self._stage.loss_ended()
        return loss
