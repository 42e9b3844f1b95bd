"""The blocks of a model: what becomes of their activations, and how long their passes take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from mlora.offload.blocks import BlockForward
from mlora.offload.options import MODES
from mlora.offload.saved_tensors import SavedTensors
from mlora.offload.stream import BlockStream
from mlora.offload.swap_space import SwapSpace

Mode = Literal["keep", "recompute", "swap"]


@dataclass
class BlockTimes:
    """Seconds of the blocks of one micro-batch, without waits for the disk.

    Attributes:
        forward: of each block.
        backward: of each block, with recomputation where the block was recomputed.
        around: of what is before, behind and between the blocks' passes.
    """

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    around: float = 0.0


class Activations:
    """Wraps the blocks' forward passes.

    Args:
        model: holds the blocks.
        blocks: in the order of a forward pass.
        space: for swapped activations.
        stream: of the blocks' weights; None if they are in memory.
        weights: for each block, the Parameters that the stream brings, by their names in its layout.
        contexts: `context_fn` of `torch.utils.checkpoint.checkpoint`, for recomputed blocks.

    Attributes:
        saved: takes what autograd saves.
        modes: of each block; set them with `choose`.
        before: the modes before `watch`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        space: SwapSpace,
        stream: BlockStream | None = None,
        weights: Sequence[Mapping[str, nn.Parameter]] | None = None,
        contexts: Callable[[], Any] | None = None,
    ) -> None:
        own = weights or [{}] * len(blocks)
        self.saved = SavedTensors(model, stream, space)
        self.modes: list[Mode] = ["keep"] * len(blocks)
        self.before: list[Mode] = list(self.modes)
        self._stream, self._space = stream, space
        self._blocks = [
            BlockForward(block, number, self.saved, stream, own[number], contexts)
            for number, block in enumerate(blocks)
        ]
        self._marks: list[tuple[str, int, float]] = []

    def choose(self, modes: Sequence[Mode]) -> None:
        """Sets what becomes of each block's activations, from the next forward pass on.

        Raises:
            ValueError: a mode is unknown, or there is not one for each block.
        """
        check_modes(modes, len(self._blocks))
        self.modes = list(modes)
        for number, (block, mode) in enumerate(zip(self._blocks, modes, strict=True)):
            block.recomputes = mode == "recompute"
            self.saved.swaps[number] = mode == "swap"

    @contextmanager
    def of_pass(self) -> Iterator[None]:
        """Takes what is saved inside `with`, which is one forward pass."""
        self._mark("begin", -1)
        with self.saved.of_pass():
            yield

    def watch(self, *, swaps: bool) -> None:
        """Begins to take times, and to count the bytes that are saved in each block.

        Two blocks keep their activations, a quarter and three quarters of the way; of fewer than four blocks
        one does. All others recompute them. If what is planned may swap, these blocks swap theirs, since
        what comes back from a disk is not in a cache.
        """
        count = len(self._blocks)
        kept = {count // 4, 3 * count // 4} if count >= 4 else {count // 2}
        self.before = list(self.modes)
        mode: Mode = "swap" if swaps else "keep"
        self.choose([mode if number in kept else "recompute" for number in range(count)])
        self._marks.clear()
        self.saved.counts = True
        for block in self._blocks:
            block.mark = self._mark

    def times(self) -> BlockTimes:
        """Returns the times of the micro-batch since `watch`, and ends it. Its backward pass is over.

        From now on one block's activations wait to be written at once, as many as the planner counts.
        """
        self._mark("end", -1)
        self.saved.counts = False
        self._space.writing = self.saved_bytes or self._space.writing
        for block in self._blocks:
            block.mark = None
        begins = {(what, number): at for what, number, at in reversed(self._marks)}
        count, found = len(self._blocks), BlockTimes()
        for number in range(count):
            found.forward.append(begins["forward ends", number] - begins["forward", number])
            ends = begins.get(("backward ends", number), begins["end", -1])
            found.backward.append(ends - begins.get(("backward", number), ends))
        whole = begins["end", -1] - begins["begin", -1]
        found.around = max(0.0, whole - sum(found.forward) - sum(found.backward))
        return found

    @property
    def saved_bytes(self) -> int:
        """The most bytes that autograd saved in a block, when they were counted last."""
        counted = self.saved.counted
        return max((size for block, size in counted.items() if block >= 0), default=0)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the latest input of a block."""
        return max(block.hidden_bytes for block in self._blocks)

    def remove(self) -> None:
        """Gives the blocks their own forward passes back."""
        for block in self._blocks:
            block.remove()

    def _mark(self, what: str, number: int) -> None:
        if not self.saved.counts:
            return
        waited = self._space.waited + (0.0 if self._stream is None else self._stream.waited)
        self._marks.append((what, number, time.perf_counter() - waited))


def check_modes(modes: Sequence[str], blocks: int) -> None:
    """Raises ValueError if a mode is unknown, or there is not one for each block."""
    wrong = [mode for mode in modes if mode not in MODES]
    if wrong:
        raise ValueError(f"activations: expected {' or '.join(MODES)}, got {wrong[0]!r}")
    if len(modes) != blocks:
        raise ValueError(f"activations: expected one for each of {blocks} blocks, got {len(modes)}")
