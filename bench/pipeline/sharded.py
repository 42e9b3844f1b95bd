"""What the contenders that shard the model have in common, and FSDP2.

FSDP2: `fully_shard` on each decoder layer, and on the rest. The frozen base is sharded; adapters are small
and whole everywhere, so that they are not gathered, and the gradients of the one that is trained are summed
by one all-reduce a step. Each process takes its share of a step's micro-batches, or, of a single one, of its
sequences. All-gathers are asynchronous and fetched one layer ahead in both directions. `keep` leaves a layer
whole between its forward and its backward: it is gathered once, not twice, and needs the whole base's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipeline.model import Model, Trained
from pipeline.turn import Case, Item, Turn, rounds

Batch = Callable[[Item], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Whole:
    """A way in which every process runs all layers.

    Args:
        case: what it runs.
        model: all layers, changed in place.
        adapters: on the model.
        batch: ids of a micro-batch.
        loss: `(logits, ids) -> scalar`.
        mesh: of all processes.
    """

    def __init__(
        self, case: Case, model: Model, adapters: int, batch: Batch, loss: Loss, mesh: DeviceMesh
    ) -> None:
        self._case, self._model, self._batch, self._loss, self._mesh = case, model, batch, loss, mesh
        self._tells = True
        self._shard()
        self.trained = Trained(model, adapters)

    def turn(self, steps: int) -> Turn:
        """Run so many steps of each adapter."""
        turn = Turn(ended=[0.0] * self._case.adapters)
        kept: list[tuple[Item, Tensor]] = []
        for adapter, step in rounds(self._case, steps):
            self._model.choice.adapter = adapter
            items = [Item(adapter, step, index) for index in range(self._case.micro_batches)]
            turn.items += items
            kept += self._run(items)
            self._reduce(adapter)
            self.trained.step(adapter)
            turn.ended[adapter] = time.monotonic()
        turn.losses = [(item, float(loss)) for item, loss in kept if self._tells]
        return turn

    def _run(self, items: list[Item]) -> list[tuple[Item, Tensor]]:
        """Forward and backward of this process's part of a step; the losses, as parts of those of all."""
        return [(item, self._train(self._batch(item), 1.0 / len(items)) * len(items)) for item in items]

    def _train(self, ids: Tensor, factor: float) -> Tensor:
        loss = self._loss(self._model(ids), ids) * factor
        loss.backward()
        return loss.detach()

    def _shard(self) -> None:
        raise NotImplementedError

    def _reduce(self, adapter: int) -> None:
        raise NotImplementedError


class Fsdp(Whole):
    """FSDP2."""

    def _shard(self) -> None:
        lora = {p for p in self._model.parameters() if p.requires_grad}
        options: dict[str, Any] = {"mesh": self._mesh, "ignored_params": lora}
        layers = list(self._model.layers)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=not self._case.keep, **options)
        fully_shard(self._model, reshard_after_forward=False, **options)
        for index, layer in enumerate(layers):
            assert isinstance(layer, FSDPModule)
            layer._set_unshard_async_op(True)
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 2])
            layer.set_modules_to_backward_prefetch(layers[index - 1 : index] if index else [])

    def _run(self, items: list[Item]) -> list[tuple[Item, Tensor]]:
        rank, size = self._mesh.get_rank(), self._mesh.size()
        if len(items) % size == 0:
            own = items[rank::size]
            return [(item, self._train(self._batch(item), 1.0 / len(items)) * len(items)) for item in own]
        own_rows = [self._batch(item).chunk(size)[rank] for item in items]
        losses = [self._train(ids, 1.0 / len(items) / size) * len(items) for ids in own_rows]
        return list(zip(items, losses, strict=True))

    def _reduce(self, adapter: int) -> None:
        gradients = [p.grad for p in self.trained.parameters[adapter] if p.grad is not None]
        sum_up(gradients)


def sum_up(tensors: list[Tensor]) -> None:
    """Sum tensors over all processes in place, by one all-reduce."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
