"""The contenders with tensor parallelism.

Both cut q, k, v, gate and up by columns of the output, o and down by columns of the input, and A and B of
their adapters likewise where that needs no communication of its own: two all-reduces of the activations per
layer in each direction. Gradients of the adapters' matrices that are whole everywhere are summed once a step.
Embedding, norms and head are whole everywhere.

`TensorParallel` does it by `parallelize_module`, whose DTensors cost the host much per operator.
`TensorByHand` holds plain tensors and sums by `all_reduce`, as Megatron-LM does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from pipeline.model import LoRALinear
from pipeline.sharded import Whole, sum_up


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
