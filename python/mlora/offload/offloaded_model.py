"""Trains anybody's PyTorch model with its weights, optimizer states and activations out of memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from mlora.offload.activations import Activations, Mode, check_modes
from mlora.offload.block_layout import BlockLayout
from mlora.offload.blocks import (
    converted_layers,
    is_offloaded,
    largest_list,
    replace_forward,
    weights_to_stream,
    write_block,
)
from mlora.offload.disk import Disk
from mlora.offload.options import BUFFERS
from mlora.offload.out_of_core import OutOfCoreAdamW
from mlora.offload.stream import BlockStream, stand_in
from mlora.offload.streamed_weight import StreamedWeight
from mlora.offload.swap_space import SwapSpace
from mlora.offload.torch_optimizer import TorchOptimizer, parameters_of
from mlora_ext import MultiLoRALinear, checkpoint_contexts
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.library import check_library

Place = Literal["device", "host", "disk"]


class offloaded:
    """Keeps a model's blocks, its optimizer's states and activations out of memory inside `with`.

    The loop stays as it is (LoHan, arXiv 2403.06504, Fig. 4): `optimizer.step()` makes the updates. With
    `active` they are made during the backward pass (section IV-C), and `optimizer.step()` waits for them. The
    optimizer's parameter groups are read then, so a learning-rate schedule steps after the optimizer.

    Matrices in blocks are streamed if they are frozen or the optimizer's. All others stay in memory: norms
    and biases, what is outside of the blocks, weights that another block or module shares, and weights that
    something else trains.

    Args:
        model: in memory, on a CPU. Inside `with` the weights of its blocks are there only during their
            passes; `state_dict()` is refused, use `weights`. Afterwards they are back in
            memory. It cannot be copied or pickled inside.
        optimizer: a new `torch.optim.AdamW`; None = the model's weights are frozen, or an optimizer of yours
            steps those that stay in memory.
        base: where the blocks' matrices are: `disk`, in scratch files; `device` or `host`, in memory.
        states: where the optimizer's fp32 weights and moments are, likewise.
        activations: of all blocks, or of each: `keep` them, `recompute` them in the backward pass, or `swap`
            them to disk. `torch.utils.checkpoint` inside the model works, too.
        blocks: the module list that holds the blocks, or its name; default: the one with the most weights.
        active: update a parameter as soon as its gradient is there, which is faster, and no gradient waits
            in memory. Nothing can be done with gradients then: clipping sees none of them. To accumulate
            gradients, run all backward passes of a step but the last one inside `accumulate()`.
        folders: for scratch files, which are striped over them; default: the system's for temporary files.
        slots: how many blocks' weights are in memory at once, at least 2.
        buffers: units of optimizer states that are under way at once; 1 = one after the other.
        rate: bytes per second of all transfers together, a stand-in for a slower disk; 0 = no bound.
        poison: overwrite a block's memory with NaN when it leaves; for tests.

    Attributes:
        stream: of the blocks' weights; None if they are in memory.
        optimizer: what updates the weights; None without an optimizer.

    Raises:
        ValueError: the model is not on a CPU, is offloaded already, its blocks are not found, or the
            optimizer is no new, plain AdamW of its Parameters, which are fp32, bf16 or fp16.
        OSError: a folder for scratch files is missing, or its disk lacks room.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> with mlora.offload.offloaded(model, optimizer, activations="recompute", active=True):
        ...     for batch in batches:
        ...         model(**batch).loss.backward()
        ...         optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        base: Place = "disk",
        states: Place = "disk",
        activations: Mode | Sequence[Mode] = "keep",
        blocks: nn.ModuleList | str | None = None,
        active: bool = False,
        folders: Sequence[str | Path] = (),
        slots: int = 3,
        buffers: int = BUFFERS,
        rate: float = 0.0,
        poison: bool = False,
    ) -> None:
        check_library()
        for key, value in (("base", base), ("states", states)):
            if value not in ("device", "host", "disk"):
                raise ValueError(f"{key}: expected device, host or disk, got {value!r}")
        for name, parameter in model.named_parameters():
            if parameter.device.type != "cpu":
                where = f"{name} is on {parameter.device}"
                raise ValueError(f"model: offloading serves models in a CPU's memory so far, but {where}")
        self.stream: BlockStream | None = None
        self.optimizer: TorchOptimizer | None = None
        self._model, self._given, self._active = model, optimizer, active
        self._name, self._blocks = _block_list(model, blocks)
        self._modes: list[Mode] = (
            [activations] * len(self._blocks) if isinstance(activations, str) else list(activations)
        )
        check_modes(self._modes, len(self._blocks))
        self._base, self._states, self._slots, self._buffers = base, states, slots, buffers
        self._disk = Disk(folders, rate=rate)
        self._poison = poison
        self._streamed: dict[str, tuple[int, nn.Parameter | MultiLoRALinear]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            given = self._given
            if is_offloaded(self._model):
                raise ValueError("model: it is in a `with mlora.offload.offloaded(...)` already")
            trained = {} if given is None else parameters_of(self._model, given)
            layouts: list[BlockLayout] = []
            undo.callback(self._move_in, layouts)
            if self._base == "disk":
                self._move_out(layouts, list(trained.values()))
                self.stream = BlockStream(layouts, self._disk, self._slots, poison=self._poison)
                undo.callback(self.stream.close)
            self._wrap(undo)
            if given is not None:
                adamw = OutOfCoreAdamW(
                    trained,
                    self._disk,
                    on_disk=self._states == "disk",
                    stream=self.stream,
                    buffers=self._buffers,
                )
                self.optimizer = TorchOptimizer(given, trained, adamw, active=self._active)
                undo.callback(self.optimizer.close)
            undo.callback(self._model.register_state_dict_pre_hook(_refuse_state_dict).remove)
            vars(self._model)["__reduce_ex__"] = _refuse_copy
            undo.callback(vars(self._model).pop, "__reduce_ex__")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def accumulate(self) -> AbstractContextManager[None]:
        """Keeps the gradients of backward passes inside `with` for the step that a later one makes."""
        return nullcontext() if self.optimizer is None else self.optimizer.accumulate()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields Parameters and lasting buffers by name; those on disk as copies, one at a time."""
        for name, (block, _) in self._streamed.items():
            assert self.stream is not None
            yield name, self.stream.tensors(block)[name].clone()
        passing = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if name not in self._streamed and name not in passing:
                yield name, tensor.detach()

    def _move_out(self, layouts: list[BlockLayout], trained: Sequence[nn.Parameter]) -> None:
        """Writes the blocks' matrices to scratch files, and leaves stand-ins in memory."""
        blocks = [weights_to_stream(block, trained) for block in self._blocks]
        uses = Counter(id(p) for weights in blocks for p in weights.values())
        inside = {id(module) for block in self._blocks for module in block.modules()}
        others = [module for module in self._model.modules() if id(module) not in inside]
        uses.update(id(p) for module in others for p in module._parameters.values())
        for number, (block, weights) in enumerate(zip(self._blocks, blocks, strict=True)):
            prefix = f"{self._name}.{number}."
            own = {prefix + name: p for name, p in weights.items() if uses[id(p)] == 1}
            layers = {f"{prefix}{name}.weight": layer for name, layer in converted_layers(block).items()}
            tensors = own | {name: layer.weight for name, layer in layers.items()}
            if not tensors:
                raise ValueError(
                    f"base: block {number} of {self._name} has no matrix to stream. Matrices stay in memory "
                    "if they are trained, but not by the given optimizer: give the optimizer, or call "
                    "model.requires_grad_(False)"
                )
            layouts.append(write_block(self._disk, tensors))
            for parameter in (*own.values(), *(layer.weight for layer in layers.values())):
                parameter.data = stand_in(parameter)
            self._streamed |= {name: (number, owner) for name, owner in (own | layers).items()}

    def _move_in(self, layouts: Sequence[BlockLayout]) -> None:
        """Brings the streamed weights back into memory."""
        for layout in layouts:
            for name, tensor in layout.views(layout.read(self._disk)).items():
                _, owner = self._streamed[name]
                if isinstance(owner, MultiLoRALinear):
                    owner.weight = nn.Parameter(tensor.clone(), requires_grad=False)
                    owner.frozen = PlainWeight(owner)
                else:
                    owner.data = tensor.clone()

    def _wrap(self, undo: ExitStack) -> None:
        """Puts the stream, and what takes saved tensors, between the model and its callers."""
        own: list[dict[str, nn.Parameter]] = [{} for _ in self._blocks]
        for name, (number, owner) in self._streamed.items():
            if isinstance(owner, MultiLoRALinear):
                assert self.stream is not None
                transposed = owner.fan_in_fan_out
                owner.frozen = StreamedWeight(self.stream, number, name, owner.weight, transposed=transposed)
                owner._parameters["weight"] = None
            else:
                own[number][name] = owner
        space = SwapSpace(self._disk)
        converted = any(isinstance(module, MultiLoRALinear) for module in self._model.modules())
        contexts = checkpoint_contexts(self._model) if converted else None
        activations = Activations(self._model, self._blocks, space, self.stream, own, contexts)
        undo.callback(activations.remove)
        activations.choose(self._modes)
        forward_of_model = self._model.forward

        @functools.wraps(forward_of_model)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with activations.of_pass():
                return forward_of_model(*args, **kwargs)

        undo.callback(replace_forward(self._model, forward))


def _refuse_state_dict(model: nn.Module, *_: object) -> None:
    raise RuntimeError(
        f"state_dict: weights of this {type(model).__name__} are on disk; use weights() of the object that "
        "`with mlora.offload.offloaded(...) as ...` gives, or ask after the `with`"
    )


def _refuse_copy(*_: object) -> None:
    raise RuntimeError("copy: weights of this model are on disk; copy or pickle it after the `with`")


def _block_list(model: nn.Module, given: nn.ModuleList | str | None) -> tuple[str, list[nn.Module]]:
    """Returns the name of the module list that holds the blocks, and the blocks."""
    if isinstance(given, nn.Module):
        name = next((name for name, module in model.named_modules() if module is given), None)
        if name is None:
            raise ValueError("blocks: the given module is not in the model")
    else:
        name = given or largest_list(model)
    try:
        found = list(model.get_submodule(name).children())
    except AttributeError as error:
        raise ValueError(f"blocks: the model has no module {name!r}") from error
    if not found:
        raise ValueError(f"blocks: {name!r} holds no blocks")
    return name, found
