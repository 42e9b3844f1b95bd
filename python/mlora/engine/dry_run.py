"""Predicts a stage's memory before anything runs: runs the same code on fake tensors.

Fake tensors have shapes but no numbers. The model is a skeleton on the meta device; a run makes some of its
blocks fake. No weight is read or made.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import mlora_ext
from mlora.data.micro_batch import BASE, MicroBatch, PackedRows
from mlora.engine.put_adapter import put_adapter
from mlora.engine.stage_group import Source, StageOptions, count_blocks, spans_of
from mlora.engine.stage_worker import StageWorker, rows_to_pass
from mlora.memory.adapter_memory import States
from mlora.memory.model import SilentRows
from mlora.model.base_model import BaseModel, take_apart
from mlora.model.cut import BlockSpan, Cut, cut_model, find_blocks, outer_modules
from mlora.model.labels import label_objective
from mlora.model.pretrained import skeleton, skeleton_of
from mlora.model.quantization import prepare_skeleton, quantizer_of
from mlora.model.quantized_shapes import ShapedWeight, put_shapes, shapes_of_model, shapes_of_skeleton
from mlora.model.task_heads import prepare_head, refuse_sample_copies, stages_apart
from mlora.objectives.custom import CustomLoss
from mlora.objectives.label_losses import LabelObjective
from mlora.objectives.registry import CROSS_ENTROPY, objective_of
from mlora.objectives.token_losses import chunk_rows
from mlora.offload.base_bytes import BaseBytes, slot_bytes
from mlora.optim.optim_config import OptimConfig
from mlora.optim.optimizer import elements
from mlora.optim.registry import optimizer_kind
from mlora.pipeline.message import Message, MessageType
from mlora.pipeline.order import ALONE
from mlora.pipeline.stage import Stage
from mlora_ext.adapters.kind import LayerSpec, ParameterSpec, TensorSpec, one_by_one
from mlora_ext.adapters.lora import Lora
from mlora_ext.adapters.registry import adapter_kind
from mlora_ext.adapters.trained_parts import TASK_HEAD, TASK_HEAD_WITH_BIAS, TRAINED_COPY, TRAINED_PARTS
from mlora_ext.errors import AdapterError
from mlora_ext.layers.adapter_layer import AdapterLayer
from mlora_ext.layers.bank import PAGE_ROWS, AdapterSlot
from mlora_ext.layers.layer_kinds import layer_kind
from mlora_ext.layers.over_module import OverModule
from mlora_ext.targets.find import low_rank, target_layers

if TYPE_CHECKING:
    from peft import LoraConfig

_OPTIM = OptimConfig(learning_rate=1.0, total_steps=1)
_LOSS = "dry"  # the objective of micro-batches with rows that have no gradient
_NAME = "dry"  # a placeholder; error messages leave it out


class DryStage:
    """Predicts the memory of one stage from the model's shapes; `span=None` is the whole model.

    Attributes:
        base: bytes of the stage's frozen weights and buffers, without what `pack_base` adds.
        knees: `PeakModel` knees of its micro-batches' phases (forward, loss, backward).
    """

    def __init__(self, source: Source, options: StageOptions, span: BlockSpan | None = None) -> None:
        self._options = options
        self._span = span if span is not None and span.stages > 1 else None
        self._model, self._quantized = _without_weights(source, options)
        self._blocks, self._outer = self._find_blocks()
        self.base = self._base()
        mlora_ext.convert_model(self._model, {}, every_linear=True)
        put_shapes(self._model, self._quantized)
        rows = chunk_rows(options.device, int(self._model.config.get_text_config().vocab_size))
        self.knees = (None, rows, None)

    def states(self, lora: LoraConfig, optim: OptimConfig) -> States:
        """Returns what an adapter takes on this stage besides its micro-batches."""
        specs, optimizer = self._specs(lora), optimizer_kind(optim.optim)
        kinds = {name: adapter_kind(spec.kind) for name, spec in low_rank(specs).items()}
        shapes, pages, kept = [], [], 0
        for name, spec in specs.items():
            layer = self._model.get_submodule(name)
            parts = layer_kind(layer, spec.kind).shapes(layer, spec)
            if name in kinds:
                kept += kinds[name].kept_bytes(getattr(layer, "out_features", 0))
            shapes += [part.shape for key, part in parts.items() if part.trained and optimizer.trains(key)]
            pages += [_page(part) for part in parts.values()]
        moments, update = optimizer.state_bytes(shapes), optimizer.step_bytes(shapes)
        return States(4 * elements(pages) + kept, 4 * elements(shapes), moments, update, _ranks(specs))

    def activations(
        self,
        loras: Mapping[str, LoraConfig],
        shapes: Sequence[Mapping[str, Sequence[int]]],
        *,
        whole: bool = False,
    ) -> list[tuple[int, ...]]:
        """Returns the bytes of each micro-batch's forward, loss and backward, as `MemorySample` has them.

        Where blocks repeat, runs one and two periods only: each further period takes the same. `whole` runs
        every block. `shapes` has each micro-batch's sequence lengths by adapter name.

        Raises ValueError on a GPU, whose kernels take no fake tensors, and where PyTorch cannot fake an
        operation of the model, such as one that depends on numbers.
        """
        if self._options.device.type != "cpu":
            raise ValueError(f"device: dry runs serve the CPU, got {self._options.device}; measure instead")
        model = copy.deepcopy(self._model)
        for name, lora in loras.items():
            put_adapter(model, name, copy.deepcopy(lora), None, 0)
        kinds = self._kinds(model)
        period = 0 if whole else _period(kinds)
        if not period:
            return self._run(model, loras, shapes, [len(kinds)])[0]
        rest, left = len(kinds) % period, len(kinds) // period - 2
        runs = self._run(model, loras, shapes, [2 * period + rest, period + rest])
        return [
            tuple(two + left * (two - one) for two, one in zip(*each, strict=True))
            for each in zip(*runs, strict=True)
        ]

    def _base(self) -> BaseBytes:
        """Returns the bytes of the model before it is converted; of a stream, without padding."""
        cut, offload = self._cut(self._model), self._options.offload
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        sizes = {name: t.nbytes for name, t in tensors}
        sizes |= {f"{name}.weight": weight.nbytes for name, weight in self._quantized.items()}
        whole = sum(size for name, size in sizes.items() if cut is None or cut.holds(name))
        if cut is None or offload.base != "disk":
            return BaseBytes(whole)
        blocks = [
            sum(self._model.get_parameter(name).nbytes for name in names)
            for names in cut.linear_weights().values()
        ]
        return BaseBytes(whole - sum(blocks), sum(blocks), slot_bytes(blocks, offload.slots))

    def _find_blocks(self) -> tuple[str, Mapping[str, frozenset[str]]]:
        """Returns what `Cut` needs of the blocks; nothing for a whole model that cannot be cut."""
        if self._span is not None:
            cut = cut_model(self._model, self._span)
            return cut.blocks, cut.outer
        try:
            blocks, _ = find_blocks(self._model)
            return blocks, outer_modules(self._model, blocks)
        except ValueError:
            return "", {}

    def _cut(self, model: PreTrainedModel, blocks: int | None = None) -> Cut | None:
        """Returns the cut that runs the stage's last blocks (default: all); None for an uncuttable model."""
        if not self._blocks:
            return None
        span = self._span or BlockSpan(0, 1, 0, len(model.get_submodule(self._blocks)))  # type: ignore[arg-type]
        if blocks is not None:
            span = replace(span, first=span.last - blocks)
        return Cut(model, span, self._blocks, self._outer)

    def _specs(self, lora: LoraConfig) -> dict[str, LayerSpec]:
        """Returns the layers on this stage that an adapter targets."""
        cut = self._cut(self._model)
        try:
            prepare_head(self._model, lora)
            found = target_layers(self._model, _NAME, copy.deepcopy(lora))
            refuse_sample_copies(self._model, _NAME, found)
        except AdapterError as error:
            raise ValueError(error.message) from error
        if cut is None:
            return found
        for name, spec in found.items():
            tied = spec.kind == TRAINED_COPY and spec.tied_to
            if tied and cut.holds(f"{name}.weight") is not cut.holds(f"{tied}.weight"):
                raise ValueError(stages_apart(name, spec))
        return {name: spec for name, spec in found.items() if _holds(cut, name, spec)}

    def _kinds(self, model: PreTrainedModel) -> list[Hashable]:
        """Returns a key for each block of the stage; blocks with equal keys take equal memory."""
        cut = self._cut(model)
        if cut is None:
            return []
        types = getattr(model.config.get_text_config(), "layer_types", None)
        blocks = list(model.get_submodule(self._blocks).children())
        return [
            (type(blocks[i]), types and types[i], tuple(_shapes(blocks[i])))
            for i in range(cut.span.first, cut.span.last)
        ]

    def _run(
        self,
        model: PreTrainedModel,
        loras: Mapping[str, LoraConfig],
        shapes: Sequence[Mapping[str, Sequence[int]]],
        counts: Sequence[int],
    ) -> list[list[tuple[int, ...]]]:
        """Runs the stage's last `count` blocks for each count; the first count must be the largest."""
        index, stages = (0, 1) if self._span is None else (self._span.stage, self._span.stages)
        found = []
        mode = FakeTensorMode()
        base = self._fill(model, self._cut(model, counts[0]), mode)
        with mode, _GroupedProducts():
            part = StageWorker(base, self._options.device)
            for name in loras:
                part.own(name, _OPTIM)
            part.objective(_LOSS, CustomLoss(lambda rows: -rows.sums()))
            stage = Stage(part, index, stages)
            labels = {name: label_objective(lora) for name, lora in loras.items()}
            for count in counts:
                base.cut = self._cut(model, count)
                try:
                    passes = [
                        _pass(stage, self._message(shape, labels, base), self._hidden(_live(shape)))
                        for shape in shapes
                    ]
                except RuntimeError as error:
                    name, reason = type(model).__name__, str(error).partition("\n")[0]
                    raise ValueError(f"base_model: {name} cannot be run dry: {reason}") from error
                found.append(passes)
        return found

    def _fill(self, model: PreTrainedModel, cut: Cut | None, mode: FakeTensorMode) -> BaseModel:
        """Replaces this stage's tensors with fake ones."""

        def fake(tensor: Tensor) -> Tensor:
            with mode:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._options.device)

        for prefix, module in list(model.named_modules()):
            if not isinstance(module, AdapterSlot) and (cut is None or _held(cut, prefix)):
                module._apply(fake, recurse=False)
        base = take_apart(model, cut)
        if self._options.gradient_checkpointing:
            base.checkpoint_activations()
        return base

    def _hidden(self, shape: Mapping[str, Sequence[int]]) -> Tensor:
        """`[T, D]`."""
        rows, width = sum(map(sum, shape.values())), self._model.config.get_text_config().hidden_size
        return torch.empty(rows, width, dtype=self._options.dtype, device=self._options.device)

    def _message(
        self,
        shape: Mapping[str, Sequence[int]],
        labels: Mapping[str, dict[str, Any] | None],
        base: BaseModel,
    ) -> Message:
        """Returns a micro-batch that trains all rows but each sequence's last, or those of its `labels`.

        Sequences of `SilentRows` are the base model's, and a loss reads them.
        """
        live, silent = _live(shape), [n for own in shape.values() for n in own if isinstance(n, SilentRows)]
        objectives = [None if (spec := labels[name]) is None else objective_of(spec) for name in live]
        trained = [
            objective.rows(lengths) if isinstance(objective, LabelObjective) else [n - 1 for n in lengths]
            for objective, lengths in zip(objectives, live.values(), strict=True)
        ]
        batch = MicroBatch(
            **self._rows(live, trained),
            steps=[0] * len(live),
            scales=[1.0] * len(live),
            measure=0,
        )
        hidden = [self._hidden(live)]
        if silent or any(objectives):
            specs = [labels[name] or (_LOSS if silent else CROSS_ENTROPY) for name in live]
            facts = [
                [objective.stand_in()] * len(lengths) if isinstance(objective, LabelObjective) else ()
                for objective, lengths in zip(objectives, trained, strict=True)
            ]
            batch = replace(batch, objectives=specs, facts=facts)
        if silent:
            quiet = {BASE: list(map(int, silent))}
            hidden.append(self._hidden(quiet))
            rows = PackedRows(**self._rows(quiet, [[length - 1 for length in silent]]))
            batch = replace(batch, silent=rows, reads=[list(range(len(silent)))] * len(live))
        for row in rows_to_pass(base, live).values():
            hidden.append(torch.empty(row.shape, dtype=row.dtype, device=self._options.device))
        content = {"number": 0, "train": True, "position": ALONE, "batch": batch}
        if self._span is not None and not self._span.is_first:
            content["activations"] = hidden
        return Message(MessageType.FORWARD, content)

    def _rows(self, shape: Mapping[str, Sequence[int]], trained: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Returns the arguments of `PackedRows` for sequences of these lengths, of which so many are trained.

        Which rows and which targets does not matter here.
        """
        rows, total = torch.zeros(sum(map(sum, trained)), dtype=torch.int32), sum(map(sum, shape.values()))
        return {
            "names": tuple(shape),
            "lengths": tuple(map(sum, shape.values())),
            "row0": (0,) * len(shape),
            "sequences": tuple(length for lengths in shape.values() for length in lengths),
            "trained": trained,
            "rows": rows,
            "targets": rows,
            "input_ids": torch.zeros(1, total, dtype=torch.int64, device=self._options.device),
        }


class _GroupedProducts(TorchDispatchMode):
    """Gives products with a mixture's frozen experts, of which PyTorch fakes those in bf16 only."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[1].dim() == 3:
            rows, weights = args[:2]
            return rows.new_empty(len(rows), weights.shape[2])
        return func(*args, **(kwargs or {}))


def _without_weights(
    source: Source, options: StageOptions
) -> tuple[PreTrainedModel, dict[str, ShapedWeight]]:
    """Returns a model's skeleton, and those of its weights that are quantised, by the layer's name."""
    if isinstance(source, PreTrainedModel):
        return skeleton_of(source), shapes_of_model(source)
    name = os.fspath(source)
    model = skeleton(name, options.dtype)
    quantizer = quantizer_of(name, model.config, options.quantization, options.dtype, options.device)
    if quantizer is None:
        return model, {}
    prepare_skeleton(model, quantizer, options.dtype, options.device)
    return model, shapes_of_skeleton(model, quantizer, options.dtype)


def dry_stages(source: Source, options: StageOptions, blocks: Sequence[int] | int = 1) -> list[DryStage]:
    """Returns a model's stages for dry runs; `blocks` of each stage, or the number of stages."""
    spans = spans_of(blocks, count_blocks(source)) if blocks != 1 else [None]
    return [DryStage(source, options, span) for span in spans]


def _ranks(specs: Mapping[str, LayerSpec]) -> tuple[tuple[str, int], ...]:
    """Returns `States.ranks` of an adapter."""
    found = sorted(one_by_one(specs).items())
    kinds = [(f"{name}, {_kind_of(spec)}", spec.rank) for name, spec in found if spec.kind != Lora.name]
    return (*((name, spec.rank) for name, spec in found), *kinds)


def _kind_of(spec: LayerSpec) -> str:
    """Returns a spec's kind; some kinds keep more rows for backward where they have dropout."""
    drops = spec.kind not in TRAINED_PARTS and adapter_kind(spec.kind).drops_base_input
    return f"{spec.kind} with dropout" if drops and spec.dropout else spec.kind


def _holds(cut: Cut, name: str, spec: LayerSpec) -> bool:
    """Whether the stage holds an adapter's part on a layer; a head that the base lacks is on the last."""
    if spec.kind in (TASK_HEAD, TASK_HEAD_WITH_BIAS):
        return cut.span.is_last
    return cut.holds(f"{name}.weight")


def _held(cut: Cut, module: str) -> bool:
    """Whether the stage holds a module's own tensors; adapters are held where their layers are."""
    if module.startswith(f"{cut.blocks}."):
        return cut.holds(f"{module}.weight")
    return all(cut.holds(f"{name}.weight") for name in cut.outer if f"{module}.".startswith(f"{name}."))


def _live(shape: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Returns the lengths of the sequences with gradient."""
    return {name: [n for n in own if not isinstance(n, SilentRows)] for name, own in shape.items()}


def _pass(stage: Stage, message: Message, gradient: Tensor) -> tuple[int, ...]:
    """Runs a micro-batch forward and backward from `gradient`; returns the bytes of its phases."""
    done = stage.forward(message)
    if not stage.is_last:
        sent = done.content["activations"]
        silent = [] if message.content["batch"].silent is None else [None]
        gradients = [gradient, *silent, *map(torch.empty_like, sent[1 + len(silent) :])]
        back = {"number": 0, "position": ALONE, "gradients": gradients, "notes": [], "report": None}
        done = stage.backward(Message(MessageType.BACKWARD, back))
    found: tuple[int, ...] = done.content["notes"][0].memory
    return found


def _shapes(block: nn.Module) -> Iterator[Hashable]:
    """Yields the shapes of a block's weights and its layers' adapters."""
    for name, parameter in block.named_parameters():
        yield name, parameter.shape
    for name, module in block.named_modules():
        if isinstance(module, AdapterLayer):
            # the parameters of a module of another kind are those above
            shape = None if isinstance(module, OverModule) else module.frozen.shape
            yield name, shape, tuple(module.specs.items())


def _page(part: ParameterSpec | TensorSpec) -> Sequence[int]:
    """Returns the shape of the memory that a new Parameter may take."""
    return part.shape if isinstance(part, TensorSpec) else (max(part.rows, PAGE_ROWS), part.width)


def _period(kinds: Sequence[Hashable]) -> int:
    """Returns the shortest repeating number of blocks; 0 if running one and two periods saves nothing."""
    for period in range(1, len(kinds) // 3 + 1):
        if kinds[period:] == kinds[:-period] and 3 * period + 2 * (len(kinds) % period) < len(kinds):
            return period
    return 0
