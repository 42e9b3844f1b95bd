"""Blocks of weights that pass through a few slots of memory, in the order in which training uses them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock

import torch
from mlora_ext._C import Ticket
from torch import Tensor, nn

from mlora.offload.block_layout import BlockLayout
from mlora.offload.buffers import buffer
from mlora.offload.disk import Disk

_POISON = 0xFF  # as bytes of fp32, bf16 and fp16: NaN


def stand_in(tensor: Tensor) -> Tensor:
    """Returns one NaN with the shape and dtype of a tensor, which takes no memory."""
    return torch.full((), float("nan"), dtype=tensor.dtype, device="cpu").expand(tensor.shape)


@dataclass(eq=False)
class _Slot:
    """Memory for one block: which one is in it, and what is left of reading it."""

    memory: Tensor
    block: int = -1
    views: Mapping[str, Tensor] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)


class BlockStream:
    """Gives out the tensors of one block at a time, and reads the next ones meanwhile.

    A forward pass uses blocks in rising order and a backward pass in falling order. So the stream knows which
    blocks come next, and a slot is taken from the block that is needed last. The last blocks of a forward
    pass stay for the backward pass, and its last blocks for the next forward pass. Another order costs time
    and changes nothing else.

    Args:
        layouts: of the blocks, in the order of a forward pass.
        disk: reads them.
        slots: how many blocks are in memory at once, at least 2; no more than there are blocks.
        poison: overwrite a slot with NaN when its block leaves, so that a use after that shows.

    Attributes:
        layouts: of the blocks.
        disk: reads them.
        loads: how many blocks were read so far.
        waited: seconds that `tensors` has waited so far.
        wait_for: called with a block before it is read: waits until all of it is in its file.
        waits: whether `wait_for` would wait; such a block is not prefetched.
        on_read: is called with each block that was read and used, and when its read began and ended, in
            nanoseconds of the machine's monotonic clock.

    Raises:
        ValueError: there is one slot, or no block.
    """

    def __init__(
        self, layouts: Sequence[BlockLayout], disk: Disk, slots: int, *, poison: bool = False
    ) -> None:
        if slots < 2 or not layouts:
            raise ValueError(f"slots: expected at least 2 slots and 1 block, got {slots} and {len(layouts)}")
        self.loads = 0
        self.waited = 0.0
        self.wait_for: Callable[[int], None] = lambda block: None
        self.waits: Callable[[int], bool] = lambda block: False
        self.on_read: Callable[[int, int, int], None] | None = None
        self.layouts, self.disk, self._poison = list(layouts), disk, poison
        self._is_closed = False
        size = max(layout.nbytes for layout in layouts)
        self._slots = [_Slot(buffer(size)) for _ in range(min(slots, len(layouts)))]
        self._held: dict[int, _Slot] = {}
        self._now, self._rises = -1, True
        self._bound: list[nn.Parameter] = []
        self._versions: Counter[tuple[int, str]] = Counter()
        self._lock = RLock()  # an optimizer's thread writes new weights into slots

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.memory.nbytes for slot in self._slots)

    def tensors(self, block: int) -> Mapping[str, Tensor]:
        """Returns a block's tensors by name. They are valid until the next call for another block.

        Raises OSError if they cannot be read; the next call tries again. RuntimeError after `close`.
        """
        if self._is_closed:
            raise RuntimeError(
                "offload: the weights of this pass went with `mlora.offload.offloaded`; run backward passes "
                "inside its `with`"
            )
        if block != self._now:
            begin = time.perf_counter()
            self.wait_for(block)
            with self._lock:
                self._turn(block)
                try:
                    self._settle(self._held.get(block) or self._load(block, self._room_for(block)))
                except OSError:
                    self._now = -1
                    raise
                self.waited += time.perf_counter() - begin
                for following, _ in zip(self._next(), range(len(self._slots) - 1), strict=False):
                    self.prefetch(following)
        return self._held[block].views

    def prefetch(self, block: int) -> None:
        """Begins to read a block that is needed next, in the place of one that is needed later."""
        with self._lock:
            if block in self._held or self.waits(block):
                return
            if (slot := self._room_for(block)) is not None:
                self._load(block, slot)

    def bind(self, parameters: Mapping[str, nn.Parameter], views: Mapping[str, Tensor]) -> None:
        """Gives Parameters their tensors, and those of the call before stand-ins."""
        for parameter in self._bound:
            parameter.data = stand_in(parameter)
        self._bound = list(parameters.values())
        for name, parameter in parameters.items():
            parameter.data = views[name]

    def close(self) -> None:
        """Gives out no more tensors: a pass that is still open would find other weights."""
        self.bind({}, {})
        self._is_closed = True

    def memory(self, block: int) -> Tensor:
        """Returns the bytes of a block's slot, valid as `tensors`; reads the block if it is not there."""
        self.tensors(block)
        return self._held[block].memory

    def block_at(self, address: int) -> int | None:
        """Returns the block whose slot begins at an address; None if none does."""
        return next((s.block for s in self._slots if s.memory.data_ptr() == address), None)

    def write(self, block: int, name: str, first: int, values: Tensor) -> None:
        """Replaces numbers of a tensor, from the index `first` on, in the block's slot if it is in one."""
        with self._lock:
            self._versions[block, name] += 1
            slot = self._held.get(block)
            if slot is not None:
                slot.views[name].view(-1)[first : first + values.numel()].copy_(values)

    def version(self, block: int, place: int) -> int:
        """Returns how often the tensor at a byte of a block's slot was written."""
        return self._versions[block, self.layouts[block].name_at(place)]

    def _turn(self, block: int) -> None:
        """Notes the direction in which blocks are used; it changes at both ends."""
        self._rises = block == 0 or self._now < block < len(self.layouts) - 1
        self._now = block

    def _distance(self, block: int) -> int:
        """Returns after how many other blocks this one is used next, as things go now."""
        last = len(self.layouts) - 1
        if self._rises:
            return block - self._now if block >= self._now else 2 * last - self._now - block + 1
        return self._now - block if block <= self._now else self._now + block + 1

    def _next(self) -> Iterator[int]:
        """Yields the blocks that are used next, the nearest first."""
        blocks = (block for block in range(len(self.layouts)) if block != self._now)
        yield from sorted(blocks, key=self._distance)

    def _room_for(self, block: int) -> _Slot | None:
        """Returns a free slot, or the one of the block that is used last, if that is after this one."""
        for slot in self._slots:
            if slot.block < 0:
                return slot
        others = [slot for slot in self._slots if slot.block != self._now]
        last = max(others, key=lambda slot: self._distance(slot.block))
        return last if self._distance(last.block) > self._distance(block) else None

    def _load(self, block: int, slot: _Slot | None) -> _Slot:
        assert slot is not None, "the block in use now is used before all others"
        self._empty(slot)
        layout = self.layouts[block]
        slot.block, slot.views = block, layout.views(slot.memory)
        self._held[block] = slot
        for one in layout.ranges:
            into = slot.memory[one.place :]
            slot.tickets.append(self.disk.read(one.file, one.offset, into, one.size))
        self.loads += 1
        return slot

    def _settle(self, slot: _Slot) -> None:
        """Waits until a slot's block is there; forgets the block if it cannot be read."""
        tickets = slot.tickets
        try:
            for ticket in tickets:
                ticket.wait()
        except OSError:
            self._empty(slot)
            raise
        slot.tickets = []
        if tickets and self.on_read is not None:
            begins, ends = zip(*(ticket.span for ticket in tickets), strict=True)
            self.on_read(slot.block, int(1e9 * min(begins)), int(1e9 * max(ends)))

    def _empty(self, slot: _Slot) -> None:
        slot.tickets = []  # reads that are under way end first
        if slot.block >= 0:
            del self._held[slot.block]
            slot.block, slot.views = -1, {}
            if self._poison:
                slot.memory.fill_(_POISON)
