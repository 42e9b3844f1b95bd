"""Measures a model's parts on this device, and cuts it into stages by what the processes measure together.

The parts are a block of each kind, the embedding, and the head with the loss. Only one part at a time has
weights, random ones; the rest of the model is a skeleton.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

import mlora_ext
from mlora.cluster.device import kind_of
from mlora.cluster.world import World
from mlora.config.run_config import RunConfig
from mlora.config.sections import PipelineConfig, QuantizationConfig
from mlora.engine.stage_group import StageOptions
from mlora.memory.meter import free_memory
from mlora.model.attention import PackedSequences
from mlora.model.base_model import BaseModel, take_apart
from mlora.model.cut import BEFORE, BEHIND, BlockSpan, Cut, find_blocks, outer_modules
from mlora.model.pretrained import skeleton
from mlora.model.quantization import prepare_skeleton, quantizer_of
from mlora.model.quantized_shapes import shapes_of_skeleton
from mlora.model.task_heads import prepare_head
from mlora.objectives.token_losses import Owners, chunked_losses, plain_losses
from mlora.planning.partition import Cost, Table, fastest, partition
from mlora.tasks.groups import held_by
from mlora_ext import MultiLoRALinear, SegmentLayout
from mlora_ext.adapters.lora_config import equally_large

if TYPE_CHECKING:
    from peft import LoraConfig

_NAME = "profiled"


def profile_base(
    source: str | Path,
    lengths: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    *,
    lora: LoraConfig | None = None,
    gradient_checkpointing: bool = False,
    streamed: bool = False,
    quantization: QuantizationConfig | None = None,
    repeats: int = 3,
) -> Table:
    """Measures what each part of a model costs for one micro-batch, without loading the model.

    Blocks are of one kind if their class, their `layer_types` entry and the shapes of their weights agree.
    The fastest of `repeats` measurements counts. `lora` is an adapter that owns all rows; default: none.
    `streamed`: the blocks' linear weights will be read from disk; the time of reading is left out. Quantised
    weights count with their own bytes; the time of dequantising, the same share of each block, is left out.
    """
    model = skeleton(str(source), dtype)
    quantizer = quantizer_of(str(source), model.config, quantization, dtype, device)
    quantized = {}
    if quantizer is not None:
        prepare_skeleton(model, quantizer, dtype, device)
        quantized = {n: one.nbytes for n, one in shapes_of_skeleton(model, quantizer, dtype).items()}
    profile = _Profile(take_apart(model), lengths, device, dtype, lora, repeats, streamed)
    profile.quantized = quantized
    if gradient_checkpointing:
        profile.base.checkpoint_activations()
    kinds: dict[Hashable, Cost] = {}
    blocks = []
    for index, kind in enumerate(profile.kinds()):
        if kind not in kinds:
            kinds[kind] = profile.block(index)
        blocks.append(kinds[kind])
    return Table(profile.embedding(), tuple(blocks), profile.head())


def measured_cut(config: RunConfig, world: World, options: StageOptions, lengths: Sequence[int]) -> list[int]:
    """Returns the number of blocks of each stage; all processes must call it, and all get the same.

    `lengths` are the sequence lengths of a usual micro-batch. Raises ValueError if no cut fits the free
    memory.
    """
    table = profile_base(
        config.base_model,
        tuple(lengths),
        options.device,
        options.dtype,
        gradient_checkpointing=options.gradient_checkpointing,
        streamed=options.offload.base == "disk",
        quantization=options.quantization,
    )
    mine = {
        "kind": kind_of(options.device),
        "table": asdict(table),
        "memory": [world.process.host, str(options.device), free_memory(options.device)],
    }
    found = world.gather("measured", mine)
    try:
        tables, limits = _tables(found, config.pipeline), _limits(found, config.pipeline)
        cut = partition(tables, limits, held_by(config), options.offload.slots)
    except ValueError as error:
        raise ValueError(f"{error}; name pipeline.partition to try one all the same") from error
    return [last - first for first, last in cut]


def _tables(found: Sequence[Mapping[str, Any]], pipeline: PipelineConfig) -> list[Table]:
    """Returns one table per stage: the slowest replica's."""
    measured = [(entry["kind"], TypeAdapter(Table).validate_python(entry["table"])) for entry in found]
    # differences between devices of one kind are noise
    least = {kind: fastest([table for other, table in measured if other == kind]) for kind, _ in measured}
    tables = [least[kind] for kind, _ in measured]

    def seconds(table: Table) -> float:
        return sum(block.seconds for block in table.blocks)

    return [max(tables[stage :: pipeline.stages], key=seconds) for stage in range(pipeline.stages)]


def _limits(found: Sequence[Mapping[str, Any]], pipeline: PipelineConfig) -> list[int | None]:
    """Returns each stage's free bytes, the least of its replicas; processes on a device share its memory."""
    places = [tuple(entry["memory"][:2]) for entry in found]
    sharing = Counter(places)
    free = [entry["memory"][2] for entry in found]
    shares = [None if f is None else f // sharing[place] for f, place in zip(free, places, strict=True)]
    stages = [shares[stage :: pipeline.stages] for stage in range(pipeline.stages)]
    return [min((share for share in stage if share is not None), default=None) for stage in stages]


class _Profile:
    """A skeleton in which one part at a time has weights."""

    def __init__(
        self,
        base: BaseModel,
        lengths: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraConfig | None,
        repeats: int,
        streamed: bool,
    ) -> None:
        self.base, self._device, self._dtype, self._repeats = base, device, dtype, repeats
        self._streamed = streamed
        self.quantized: Mapping[str, int] = {}
        self._blocks, self._count = find_blocks(base.model)
        self._outer = outer_modules(base.model, self._blocks)
        mlora_ext.convert_model(base.model, {}, every_linear=True)
        if lora is not None:
            prepare_head(base.model, lora)
            mlora_ext.add_adapter(base.model, _NAME, equally_large(copy.deepcopy(lora)))
        base.model.train()
        base.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        self._rows = sum(lengths)
        self._layout = SegmentLayout.from_lengths([self._rows], [-1 if lora is None else 0])
        self._names = [] if lora is None else [_NAME]
        self._sequences = PackedSequences.of(lengths, device)
        self._positions = torch.cat([torch.arange(n, device="cpu") for n in lengths]).unsqueeze(0).to(device)

    def kinds(self) -> list[Hashable]:
        """Returns a key for each block; blocks with equal keys cost the same."""
        types = getattr(self.base.model.config.get_text_config(), "layer_types", None)
        return [
            (
                type(block),
                types and types[index],
                tuple((name, parameter.shape) for name, parameter in block.named_parameters()),
            )
            for index, block in enumerate(self.base.model.get_submodule(self._blocks).children())
        ]

    def block(self, index: int) -> Cost:
        """Measures one block, called as the model's own loop calls it."""
        block = self.base.model.get_submodule(f"{self._blocks}.{index}")
        calls: list[tuple[Any, Any]] = []
        handle = block.register_forward_pre_hook(
            lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        weights = self._materialise([block])
        with torch.no_grad(), self.base.packed(), self._routed():
            self._run(BlockSpan(1, 3, index, index + 1), self._states())
        handle.remove()
        (args, kwargs), states = calls[0], self._states()

        def forward() -> Tensor:
            given = states.unsqueeze(0).requires_grad_()
            if args:
                output = block(given, *args[1:], **kwargs)
            else:
                output = block(**{**kwargs, "hidden_states": given})
            return output if isinstance(output, Tensor) else output[0]

        seconds, activations = self._measure(forward, lambda output: output.backward(torch.ones_like(output)))
        prefix = f"{self._blocks}.{index}."
        linear = {f"{prefix}{n}": m for n, m in block.named_modules() if isinstance(m, MultiLoRALinear)}
        streamed = sum(layer.weight.nbytes for layer in linear.values()) if self._streamed else 0
        saved = sum(linear[n].weight.nbytes - size for n, size in self.quantized.items() if n in linear)
        self._drop([block])
        return Cost(seconds, weights - streamed - saved, activations, streamed)

    def embedding(self) -> Cost:
        """Measures what comes before the blocks, forward only: nothing there is trained."""
        modules = self._modules(BEFORE)
        weights = self._materialise(modules)
        ids = torch.zeros(1, self._rows, dtype=torch.int64, device=self._device)
        seconds, _ = self._measure(lambda: self._run(BlockSpan(0, 2, 0, 0), ids), lambda output: None)
        self._drop(modules)
        return Cost(seconds, weights)

    def head(self) -> Cost:
        """Measures what comes after the blocks, and the loss over all rows."""
        modules = self._modules(BEHIND)
        weights = self._materialise(modules)
        base, count = self.base, self._count
        targets = torch.zeros(self._rows, dtype=torch.int64, device=self._device)
        span = BlockSpan(1, 2, count, count + 1)
        owners = Owners([self._rows], [1.0])

        def loss() -> Tensor:
            hidden = self._run(span, self._states()).detach().requires_grad_()
            head = base.frozen_head()
            if head is None:
                total = plain_losses(base.logits(hidden), targets, owners).total
            else:
                every = torch.arange(self._rows, device=self._device)
                total = chunked_losses(hidden, head, every, targets, owners).total
            return total

        seconds, activations = self._measure(loss, lambda total: total.backward())
        if base.frozen_head() is not None:
            # The chunked loss computes the gradient of its input in forward.
            activations += self._states().nbytes
        self._drop(modules)
        return Cost(seconds, weights, activations)

    def _states(self) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(0)
        states = torch.randn(self._rows, self.base.hidden_size, generator=generator, device="cpu")
        return states.to(self._device, self._dtype)

    def _run(self, span: BlockSpan, given: Tensor) -> Tensor:
        """Runs a span's blocks, or the parts around them, on ids or on hidden states."""
        self.base.cut = Cut(self.base.model, span, self._blocks, self._outer)
        pair = (given, None) if span.is_first else (None, given)
        return self.base.hidden(pair[0], self._positions, self._sequences, pair[1])

    def _measure(
        self, forward: Callable[[], Tensor], backward: Callable[[Tensor], object]
    ) -> tuple[float, int]:
        """Returns the seconds of forward and backward, and the bytes that forward keeps for backward."""
        seconds = []
        own = {p.untyped_storage().data_ptr() for p in self.base.model.parameters() if not p.is_meta}
        kept: dict[int, int] = {}  # bytes of what is saved for backward, by place

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor

        with self.base.packed():
            for repeat in range(self._repeats + 1):
                counting = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
                with self._routed(), counting if repeat == 0 else nullcontext():
                    self._wait()
                    begin = time.perf_counter()
                    output = forward()
                backward(output)
                self._wait()
                seconds.append(time.perf_counter() - begin)
        return min(seconds[1:]), sum(kept.values())

    def _routed(self) -> AbstractContextManager[None]:
        steps = [0] * len(self._names)
        return mlora_ext.route(self.base.model, self._layout, self._names, steps=steps)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _modules(self, place: str) -> list[nn.Module]:
        return [self.base.model.get_submodule(n) for n, places in self._outer.items() if place in places]

    def _materialise(self, modules: list[nn.Module]) -> int:
        """Gives modules random weights; returns their bytes without those of adapters."""
        for module in modules:
            module._apply(self._random)
        frozen = [p for m in modules for p in m.parameters() if not p.requires_grad]
        return sum(p.numel() * p.element_size() for p in frozen)

    def _random(self, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(self._device)
        real = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
        return real.normal_(std=0.02) if real.is_floating_point() else real

    def _drop(self, modules: list[nn.Module]) -> None:
        for module in modules:
            module._apply(lambda tensor: torch.empty_like(tensor, device="meta"))
