"""Ports: one direction between two neighbouring stages, a strict FIFO of messages.

On the wire a message is an envelope (`envelope.py`) with its header and small tensors, then each large
tensor.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.world import PeerError
from .envelope import BLOCK, as_bytes, is_small, rest_of, seal, split, unseal
from .message import Header, Message, Shape, decode, encode, map_tensors
from .wire import Wire


class Port(Protocol):
    """One end of one direction. Calls block; one thread writes, another one reads.

    Attributes:
        began: when the last message read began to arrive, in nanoseconds of the monotonic clock.
        sent: bytes written so far; 0 between threads, which share memory.
    """

    began: int
    sent: int

    def write(self, credit: int, message: Message | None) -> None:
        """Sends a message, if any, and `credit`: the bytes that the other direction may send again."""

    def read(self) -> tuple[int, Message | None]:
        """Waits for the other end's `write`; raises PeerError if that end was closed."""

    def close(self) -> None:
        """Ends the direction: `read` raises, and `write` may."""


class LocalPort:
    """Both ends in one process, for stages that are threads; the reader gets its tensors on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._queue: queue.SimpleQueue[tuple[int, Message | None] | None] = queue.SimpleQueue()
        self._lane = Lane(device)
        self.began = self.sent = 0

    def write(self, credit: int, message: Message | None) -> None:
        self._queue.put((credit, message))

    def read(self) -> tuple[int, Message | None]:
        found = self._queue.get()
        if found is None:
            raise PeerError("closed by the other end")
        credit, message = found
        self.began = time.monotonic_ns()
        return credit, message and self._lane.take_over(message)

    def close(self) -> None:
        self._queue.put(None)


class WirePort:
    """One end of one direction between two processes; the reader gets its tensors on `device`.
    Large GPU tensors travel through pinned host memory, or from GPU to GPU over `nccl`, their own group."""

    def __init__(
        self,
        wire: Wire,
        device: torch.device,
        nccl: dist.ProcessGroup | None = None,
    ) -> None:
        self._wire, self._nccl = wire, nccl
        self._lane = Lane(device)
        self.began = self.sent = 0

    def write(self, credit: int, message: Message | None) -> None:
        if message is None:
            self._send(seal(credit))
            return
        header, tensors = encode(message)
        with self._lane.after(message):
            envelope = seal(credit, header, [tensor for tensor in tensors if is_small(tensor)])
            large = [tensor for tensor in tensors if not is_small(tensor)]
            if self._nccl is None:
                for tensor in large:  # one at a time on the host: a model has thousands of weights
                    self._send([*envelope, as_bytes(self._lane.on_host(tensor))])
                    envelope = []
                self._send(envelope)
                return
            self._send(envelope)
            for tensor in large:
                # the core of `torch.distributed.send`; its checks cost as much again
                self._nccl.send([self._lane.to_send(tensor)], 1 - self._nccl.rank(), 0).wait()
                self.sent += tensor.nbytes

    def read(self) -> tuple[int, Message | None]:
        block = self._wire.receive(torch.empty(BLOCK, dtype=torch.uint8))
        self.began = time.monotonic_ns()
        more = rest_of(block)
        rest = self._wire.receive(torch.empty(more, dtype=torch.uint8)) if more else None
        encoded, small, credit = unseal(block, rest)
        if not encoded:
            return credit, None
        header = Header.of(encoded)
        with self._lane.entered():
            beside = iter(split(small, [(each.shape, each.dtype) for each in header.shapes if each.small]))
            tensors = [next(beside) if each.small else self._receive_large(each) for each in header.shapes]
            tensors = [self._lane.on_device(tensor) for tensor in tensors]
        return credit, self._lane.arrived(decode(header, tensors))

    def close(self) -> None:
        self._wire.close()

    def _receive_large(self, expected: Shape) -> Tensor:
        tensor = self._lane.empty(expected.shape, expected.dtype, on_device=self._nccl is not None)
        if self._nccl is not None:
            self._nccl.recv([tensor], 1 - self._nccl.rank(), 0).wait()
        else:
            self._wire.receive(as_bytes(tensor))
        return tensor

    def _send(self, parts: Sequence[Tensor]) -> None:
        self._wire.send(parts)
        self.sent += sum(part.nbytes for part in parts)


class Lane:
    """One role's stream on a GPU. On a CPU the roles are threads only, and a lane does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def entered(self) -> Any:
        """Returns a context in which this role's stream is the current one."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after(self, message: Message) -> Any:
        """Returns the same context; work launched inside waits for the message's tensors."""
        if self._stream is not None and message.ready is not None:
            self._stream.wait_event(message.ready)
        return self.entered()

    def on_host(self, tensor: Tensor) -> Tensor:
        """Returns the tensor in host memory, after the copy has ended."""
        if not tensor.is_cuda:
            return tensor
        assert self._stream is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def to_send(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on this stage's device; its memory is not reused until this role has sent it."""
        if tensor.is_cuda and self._stream is not None:
            tensor.record_stream(self._stream)
        return self.on_device(tensor).contiguous()

    def on_device(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on this stage's device; a copy to a GPU may still run on this role's stream."""
        return tensor.to(self._device, non_blocking=self._stream is not None)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, on_device: bool) -> Tensor:
        """Returns an empty tensor on the device, or on the host, pinned if the device is a GPU."""
        if on_device:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def arrived(self, message: Message) -> Message:
        """Records in the message when its tensors are there."""
        if self._stream is not None:
            message.ready = torch.cuda.Event()
            message.ready.record(self._stream)
        return message

    def take_over(self, message: Message) -> Message:
        """Returns a message of another stage of this process with its tensors on this stage's device."""
        if self._stream is None:
            if message.ready is None:
                return message
            message.ready.synchronize()
            return map_tensors(message, self.on_device)
        with self.after(message):
            return self.arrived(map_tensors(message, self.on_device))
