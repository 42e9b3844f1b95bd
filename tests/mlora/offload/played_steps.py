"""Steps that are played in virtual time: the planner predicts what they take.

The stream is the real one, with its own choice of what to read when; only its disk and the clock are played.
"""

import heapq
from types import SimpleNamespace

from mlora.offload.stream import BlockStream


class Clock:
    """The time of the device."""

    now = 0.0


class PlayedDisk:
    """Reads one after the other, as `BlockStream` asks for them."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds, self._free = clock, seconds, 0.0

    def read(self, *_: object) -> SimpleNamespace:
        done = self._free = max(self._free, self._clock.now) + self._seconds
        return SimpleNamespace(wait=lambda: setattr(self._clock, "now", max(self._clock.now, done)))


def played_stream(blocks: int, slots: int, read: float, forward: float, backward: float) -> float:
    """Seconds of a step over a streamed base, after two steps to warm up."""
    clock = Clock()
    one = SimpleNamespace(
        nbytes=1, views=lambda memory: {}, ranges=[SimpleNamespace(file=0, offset=0, size=1, place=0)]
    )
    stream = BlockStream([one] * blocks, PlayedDisk(clock, read), slots)  # type: ignore[list-item, arg-type]
    begin = 0.0
    for _ in range(3):
        begin = clock.now
        for order, seconds in ((range(blocks), forward), (reversed(range(blocks)), backward)):
            for block in order:
                stream.tensors(block)
                clock.now += seconds
    return clock.now - begin


def played_update(blocks: int, backward: float, read: float, update: float, write: float) -> float:
    """Seconds of a backward pass with an active update: read i, read i - 1, write i, on one disk.

    The states of the first two blocks are asked for at once, those of a later one when the gradient of the
    block two before it has come.
    """
    wanted: list[tuple[float, int, str]] = []  # when it was asked for, the block, what
    for block in range(2):
        heapq.heappush(wanted, (0.0, block, "read"))
    free = updated = 0.0
    end = blocks * backward
    while wanted:
        asked, block, what = heapq.heappop(wanted)
        free = max(free, asked) + (read if what == "read" else write)
        if what == "write":
            end = max(end, free)
            continue
        gradient = (block + 1) * backward
        if block + 2 < blocks:
            heapq.heappush(wanted, (max(gradient, free), block + 2, "read"))
        updated = max(updated, gradient, free) + update
        heapq.heappush(wanted, (updated, block, "write"))
    return end
