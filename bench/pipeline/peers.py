"""The contenders of others: FSDP2, tensor parallelism, and `torch.distributed.pipelining`.

FSDP2: `fully_shard` on each decoder layer, and on the rest. The frozen base is sharded; adapters are small
and whole everywhere, so that they are not gathered, and the gradients of the one that is trained are summed
by one all-reduce a step. Each process takes its share of a step's micro-batches, or, of a single one, of its
sequences. All-gathers are asynchronous and fetched one layer ahead in both directions. `keep` leaves a layer
whole between its forward and its backward: it is gathered once, not twice, and needs the whole base's memory.

Tensor parallelism cuts q, k, v, gate and up by columns of the output, o and down by columns of the input, and
A and B of their adapters likewise where that needs no communication of its own: two all-reduces of the
activations per layer in each direction. Gradients of the adapters' matrices that are whole everywhere are
summed once a step. Embedding, norms and head are whole everywhere. `TensorParallel` does it by
`parallelize_module`, whose DTensors cost the host much per operator; `TensorByHand` holds plain tensors and
sums by `all_reduce`, as Megatron-LM does.

torch's pipelines have the same modules as ours, micro-batches as large, and the fastest settings: no outputs
collected, gradients not scaled, no barrier between flushes, losses not read inside a turn. With `joint` the
micro-batches of all adapters are one flush, after which all are updated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from mlora.pipeline.trace import Span
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from pipeline.model import LoRALinear, Model, Trained
from pipeline.places import Case, Item, Turn, rounds

Batch = Callable[[Item], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


class Whole:
    """A way in which every process runs all layers."""

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


class _Tensor(Whole):
    def _shard(self) -> None:
        self._tells = self._mesh.get_rank() == 0
        for layer in self._model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in part.named_children():
                    if isinstance(linear, LoRALinear):
                        self._cut(linear, by_rows=name in ("o_proj", "down_proj"))
                self._enclose(part)

    def _cut(self, linear: LoRALinear, *, by_rows: bool) -> None:
        raise NotImplementedError

    def _enclose(self, part: nn.Module) -> None:
        raise NotImplementedError


class TensorParallel(_Tensor):
    """Tensor parallelism by `parallelize_module`."""

    def _cut(self, linear: LoRALinear, *, by_rows: bool) -> None:
        if by_rows:
            style: Any = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
            cut, whole = linear.lora_A, linear.lora_B
            out = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())
            parallelize_module(linear, self._mesh, out)
        else:
            style = ColwiseParallel(use_local_output=True)
            cut, whole = linear.lora_B, linear.lora_A
        for module in (linear.base, *cut):
            parallelize_module(module, self._mesh, style)
        for module in whole:
            distribute_module(module, self._mesh)

    def _enclose(self, part: nn.Module) -> None:
        """The input becomes a DTensor once: gradients of all layers that read it are summed once."""
        place = Replicate()
        if isinstance(part, LlamaAttention):
            named = {"hidden_states": place}
            layouts: Any = {"input_kwarg_layouts": named, "desired_input_kwarg_layouts": named}
        else:
            layouts = {"input_layouts": (place,), "desired_input_layouts": (place,)}
        parallelize_module(part, self._mesh, PrepareModuleInput(**layouts))

    def _reduce(self, adapter: int) -> None:
        partial = []
        for parameter in self.trained.parameters[adapter]:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            if any(isinstance(place, Partial) for place in gradient.placements):
                partial.append((parameter, gradient.to_local()))
        sum_up([local for _, local in partial])
        for parameter, local in partial:
            parameter.grad = DTensor.from_local(local, self._mesh, [Replicate()])


class TensorByHand(_Tensor):
    """Tensor parallelism with plain tensors."""

    def _shard(self) -> None:
        self._whole: set[int] = set()
        super()._shard()

    def _cut(self, linear: LoRALinear, *, by_rows: bool) -> None:
        cut, whole = (linear.lora_A, linear.lora_B) if by_rows else (linear.lora_B, linear.lora_A)
        rank, size = self._mesh.get_rank(), self._mesh.size()
        for module in (linear.base, *cut):
            part = module.weight.detach().chunk(size, dim=1 if by_rows else 0)[rank].contiguous()
            module.weight = nn.Parameter(part, requires_grad=module.weight.requires_grad)
        self._whole |= {id(module.weight) for module in whole}

    def _enclose(self, part: nn.Module) -> None:
        part.register_forward_pre_hook(_enter, with_kwargs=True)
        part.register_forward_hook(_leave)

    def _reduce(self, adapter: int) -> None:
        sum_up([p.grad for p in self._parts(adapter) if p.grad is not None])

    def _parts(self, adapter: int) -> Iterator[Tensor]:
        yield from (p for p in self.trained.parameters[adapter] if id(p) in self._whole)


def _enter(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if given:
        return (_SumBackward.apply(given[0]), *given[1:]), named
    return given, named | {"hidden_states": _SumBackward.apply(named["hidden_states"])}


def _leave(part: nn.Module, given: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_SumForward.apply(output[0]), *output[1:])
    return _SumForward.apply(output)


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dx = dy.clone()
        dist.all_reduce(dx)
        return dx


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


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
    """One process's stage."""

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
