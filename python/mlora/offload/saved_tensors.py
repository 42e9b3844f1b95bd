"""Where the tensors are that autograd saves for the backward pass.

The source of swapping is LoHan (arXiv 2403.06504), section IV-D.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from mlora.offload.stream import BlockStream
from mlora.offload.swap_space import Swapped, SwapSpace

SMALLEST = 64 << 10
"""Bytes below which a tensor stays in memory."""


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _are_taken() -> bool:
    """Whether something else takes what autograd saves, such as `torch.utils.checkpoint`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@dataclass(frozen=True)
class _View:
    """A tensor as a view of bytes: its type and place in them."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def place(self) -> int:
        """The first byte."""
        return self.offset * self.dtype.itemsize

    def on(self, content: Tensor) -> Tensor:
        """Returns the tensor on other bytes of the same layout."""
        size = self.dtype.itemsize
        typed = content[: content.nbytes // size * size].view(self.dtype)
        return typed.as_strided(self.shape, self.stride, typed.storage_offset() + self.offset)


@dataclass(frozen=True)
class _InSlot:
    """A saved weight: autograd keeps its place, and it is read again; `version` as `BlockStream.version`."""

    block: int
    view: _View
    version: int


@dataclass(frozen=True)
class _OnDisk:
    """A saved activation that was swapped out."""

    block: int
    view: _View
    swapped: Swapped
    others: _Pass


class _Pass:
    """What one forward pass swapped out, by block."""

    def __init__(self) -> None:
        self._swapped: dict[int, list[weakref.ref[Swapped]]] = {}
        self._lowest: int | None = None

    def add(self, block: int, swapped: Swapped) -> None:
        self._swapped.setdefault(block, []).append(weakref.ref(swapped))

    def prefetch(self, block: int) -> None:
        """Begins to read a block's tensors and those of the block before it; only once for each block."""
        if self._lowest is not None and block >= self._lowest:
            return
        self._lowest = block
        earlier = [other for other in self._swapped if other < block]
        for number in (block, *([max(earlier)] if earlier else [])):
            for ref in self._swapped.get(number, ()):
                if (swapped := ref()) is not None:
                    swapped.prefetch()


class SavedTensors:
    """Takes the tensors that autograd saves: weights of streamed blocks, and activations of swapped blocks.

    A streamed weight is saved as its place, since its memory is used for another block soon. The activations
    of a swapped block are written to disk in the forward pass; those of the block before are read while a
    block's backward pass computes.

    Args:
        model: its Parameters and buffers are never swapped.
        stream: of the blocks' weights; None if they are in memory.
        space: for swapped activations; None if there are none.

    Attributes:
        swaps: whether a block's activations are swapped, by block.
        counted: bytes of activations that autograd saved in the latest forward pass, by block; filled if
            `counts` is set.
        recomputed: the streamed block that runs again for the backward pass that is under way; None if none
            has since the latest gradient of a block's output came.
    """

    def __init__(self, model: nn.Module, stream: BlockStream | None, space: SwapSpace | None) -> None:
        self.swaps: dict[int, bool] = {}
        self.counts = False
        self.counted: dict[int, int] = {}
        self._model, self._stream, self._space = model, stream, space
        self.recomputed: int | None = None
        self._block, self._is_in_pass = -1, False
        self._pass = _Pass()
        self._lasting: set[int] = set()
        self._seen: dict[tuple[int, int], tuple[Tensor, Swapped | None]] = {}

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Takes what is saved inside `with`, which is one forward pass."""
        counts_or_swaps = self.counts or any(self.swaps.values())
        if not torch.is_grad_enabled() or (self._stream is None and not counts_or_swaps):
            yield
            return
        self._pass, self.counted, self.recomputed = _Pass(), {}, None
        self._is_in_pass = True
        if counts_or_swaps:
            tensors = (*self._model.parameters(), *self._model.buffers())
            self._lasting = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        with saved_tensors_hooks(self._pack, self._unpack):
            try:
                yield
            finally:
                self._block, self._lasting, self._seen = -1, set(), {}
                self._is_in_pass = False

    @contextmanager
    def of_block(self, block: int, *shared: object) -> Iterator[None]:
        """Takes what is saved inside `with`, which is one block's forward pass, also outside of `of_pass`.

        Tensors among `shared`, such as positions, serve all blocks; they are not swapped.
        """
        taken = self._is_in_pass or is_in_backward() or _are_taken()
        with nullcontext() if taken else self.of_pass():
            self._enter(block, *shared)
            try:
                yield
            finally:
                self._block = -1  # what the output head saves is no block's

    def recompute(self, block: int) -> None:
        """Notes that a streamed block runs again in a backward pass.

        Raises RuntimeError if another one did just before: autograd now has that block's weights themselves,
        whose memory is used again before it needs them.
        """
        if self.recomputed not in (None, block):
            raise RuntimeError(
                f"torch.utils.checkpoint: blocks {self.recomputed} and {block} are recomputed together, "
                "which streamed weights do not allow; checkpoint each block by itself"
            )
        self.recomputed = block

    def _enter(self, block: int, *shared: object) -> None:
        self._block, self._seen = block, {}
        for tensor in tree_iter(shared):
            if isinstance(tensor, Tensor):
                self._lasting.add(tensor.untyped_storage().data_ptr())

    def _pack(self, tensor: Tensor) -> object:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg():
            return tensor.detach()
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if self._stream is not None and (block := self._stream.block_at(address)) is not None:
            view = _View.of(tensor)
            return _InSlot(block, view, self._stream.version(block, view.place))
        swaps = self.swaps.get(self._block, False)
        if not (swaps or self.counts) or storage.nbytes() < SMALLEST or address in self._lasting:
            return tensor.detach()  # the tensor itself would hold its own graph
        key = address, tensor._version
        if key not in self._seen:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.counted[self._block] = self.counted.get(self._block, 0) + storage.nbytes()
            self._seen[key] = whole, self._swap_out(whole) if swaps else None
        swapped = self._seen[key][1]
        if swapped is None:
            return tensor.detach()
        return _OnDisk(self._block, _View.of(tensor), swapped, self._pass)

    def _swap_out(self, whole: Tensor) -> Swapped:
        assert self._space is not None, "blocks are swapped where there is room for them"
        swapped = self._space.swap_out(whole)
        self._pass.add(self._block, swapped)
        return swapped

    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, _InSlot):
            assert self._stream is not None
            if self._stream.version(packed.block, packed.view.place) != packed.version:
                raise RuntimeError(
                    "a weight that this backward pass needs was updated after its forward pass; call "
                    "backward before optimizer.step, as without offloading"
                )
            return packed.view.on(self._stream.memory(packed.block))
        if isinstance(packed, _OnDisk):
            packed.others.prefetch(packed.block)
            return packed.view.on(packed.swapped.content())
        assert isinstance(packed, Tensor)
        return packed
