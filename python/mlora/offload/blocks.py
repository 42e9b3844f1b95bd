"""The blocks of a model: which module holds them, and how their weights come and go with each pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from mlora.offload.block_layout import BlockLayout, StoredTensor
from mlora.offload.buffers import aligned, buffer
from mlora.offload.disk import Disk
from mlora.offload.saved_tensors import SavedTensors, is_in_backward
from mlora.offload.stream import BlockStream
from mlora_ext import MultiLoRALinear
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.layers.adapter_layer import AdapterLayer


def largest_list(model: nn.Module) -> str:
    """Returns the name of the module list with the most weights: the blocks of most models.

    Raises:
        ValueError: the model has no module list.
    """
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    if not any(sizes.values()):
        raise ValueError(f"blocks: {type(model).__name__} has no ModuleList with weights; name its blocks")
    return max(sizes, key=lambda name: sizes[name])


def weights_to_stream(block: nn.Module, trained: Collection[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Returns a block's matrices that are frozen or `trained`, by their names in the block.

    Others, and those in converted layers, belong to an optimizer in memory.
    """
    converted = {id(p) for m in block.modules() if isinstance(m, AdapterLayer) for p in m.parameters()}
    of_optimizer = {id(p) for p in trained}
    return {
        name: p
        for name, p in block.named_parameters()
        if p.ndim >= 2 and id(p) not in converted and (not p.requires_grad or id(p) in of_optimizer)
    }


def converted_layers(block: nn.Module) -> dict[str, MultiLoRALinear]:
    """Returns a block's converted layers whose weights are in memory, by name."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, MultiLoRALinear) and isinstance(module.frozen, PlainWeight)
    }


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Puts a function in the place of a module's `forward`; returns what takes it away again."""
    before = vars(module).get("forward")
    forward.offloads = True  # type: ignore[attr-defined]
    module.forward = forward

    def undo() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    return undo


def is_offloaded(model: nn.Module) -> bool:
    """Whether `replace_forward` was called for a module of a model, and not undone."""
    return any(hasattr(vars(module).get("forward"), "offloads") for module in model.modules())


@torch.no_grad()
def write_block(disk: Disk, tensors: Mapping[str, Tensor]) -> BlockLayout:
    """Writes a block's tensors to a scratch file, each at a multiple of `ALIGN`.

    Raises OSError if a folder for scratch files is missing or its disk lacks room.
    """
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name], size = size, size + aligned(tensor.nbytes)
    file, content = disk.scratch(size), buffer(size)
    for name, tensor in tensors.items():
        flat = content[places[name] : places[name] + tensor.nbytes].view(tensor.dtype)
        flat.view(tensor.shape).copy_(tensor)
    disk.write(file, 0, content).wait()
    return BlockLayout(
        {
            name: StoredTensor(file, places[name], tensor.dtype, tuple(tensor.shape), scratch=True)
            for name, tensor in tensors.items()
        }
    )


class BlockForward:
    """A block's forward pass: brings its weights, runs it, and lets them go.

    It takes the place of the module's `forward`. Something inside of that may be recomputed in the backward
    pass, so the weights are there, too, from the moment in which the gradient of the block's output is known
    until another block's weights are.

    Args:
        module: the block.
        number: its place in the order of a forward pass.
        saved: hears of the block before its forward pass.
        stream: brings the weights; None if they are in memory.
        weights: the Parameters that the stream brings, by their names in its layout.
        contexts: `context_fn` of `torch.utils.checkpoint.checkpoint`.

    Attributes:
        recomputes: whether the block keeps its input only and runs again in the backward pass.
        remove: gives the module its own forward pass back.
        mark: hears when the block's passes begin and end.
        hidden_bytes: of its latest input.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        saved: SavedTensors,
        stream: BlockStream | None = None,
        weights: Mapping[str, nn.Parameter] | None = None,
        contexts: Callable[[], Any] | None = None,
    ) -> None:
        self.recomputes, self.hidden_bytes = False, 0
        self.mark: Callable[[str, int], None] | None = None
        self._number, self._saved, self._stream = number, saved, stream
        self._weights = dict(weights or {})
        self._forward = module.forward

        again: Any = checkpoint if contexts is None else functools.partial(checkpoint, context_fn=contexts)

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            self.hidden_bytes = 0 if hidden is None else hidden.nbytes
            if self.mark is not None:
                self.mark("forward", number)
                if hidden is not None and hidden.requires_grad:
                    hidden.register_hook(self._backward_ends)
            if self.recomputes and torch.is_grad_enabled():
                output = again(self._run, *args, use_reentrant=False, **kwargs)
            else:
                output = self._run(*args, **kwargs)
            if self.mark is not None:
                self.mark("forward ends", number)
            if torch.is_grad_enabled() and (self._weights or self.mark is not None):
                for tensor in tree_iter(output):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(self._backward_begins)
            return output

        self.remove = replace_forward(module, forward)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self._saved.of_block(self._number, args[1:], kwargs):
            return self._with_weights(*args, **kwargs)

    def _with_weights(self, *args: Any, **kwargs: Any) -> Any:
        if self._stream is None or not self._weights:
            return self._forward(*args, **kwargs)
        if is_in_backward():
            self._saved.recompute(self._number)
        self._stream.bind(self._weights, self._stream.tensors(self._number))
        try:
            return self._forward(*args, **kwargs)
        finally:
            if not is_in_backward():  # where a part of the block may be recomputed once more
                self._stream.bind({}, {})

    def _backward_begins(self, _: Tensor) -> None:
        self._saved.recomputed = None
        if self._stream is not None and self._weights:
            self._stream.bind(self._weights, self._stream.tensors(self._number))
        if self.mark is not None:
            self.mark("backward", self._number)

    def _backward_ends(self, _: Tensor) -> None:
        if self.mark is not None:
            self.mark("backward ends", self._number)
