"""Ports: one direction between two neighbouring stages, a strict FIFO of messages.

On the wire a message is its head (`[2]` int64, the bytes of the header and the credit, then the header), and
its tensors. A head has at least `_HEAD` bytes, because each part that is received costs a wake-up.
"""

from __future__ import annotations

import queue
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster.world import PeerError
from .message import Message, decode
from .wire import Wire

_HEAD = 2048
_PREFIX = struct.Struct("<qq")


class Port(ABC):
    """One end of one direction. Calls block; one thread writes, another one reads.

    The reader gets its tensors on `device`. On a GPU each end has a stream of its own.

    Attributes:
        began: when the last message read began to arrive, in nanoseconds of the monotonic clock.
        sent: bytes written so far; 0 between threads, which share memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.began = self.sent = 0

    @abstractmethod
    def write(self, credit: int, message: Message | None) -> None:
        """Sends a message, if any, and `credit`: the bytes that the other direction may send again."""

    @abstractmethod
    def read(self) -> tuple[int, Message | None]:
        """Waits for the other end's `write`; raises PeerError if that end was closed."""

    @abstractmethod
    def close(self) -> None:
        """Ends the direction: `read` raises, and `write` may."""

    def _entered(self, message: Message | None = None) -> Any:
        """Returns a context in which this end's stream is current, and waits for a message's tensors."""
        if self._stream is None:
            return nullcontext()
        if message is not None and message.ready is not None:
            self._stream.wait_event(message.ready)
        return torch.cuda.stream(self._stream)

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Returns the tensor on this stage's device; a copy to a GPU may still run on this end's stream."""
        return tensor.to(self._device, non_blocking=self._stream is not None)

    def _arrived(self, message: Message) -> Message:
        """Records in a message when its tensors are there."""
        if self._stream is not None:
            message.ready = torch.cuda.Event()
            message.ready.record(self._stream)
        return message


class LocalPort(Port):
    """Both ends in one process, for stages that are threads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._queue: queue.SimpleQueue[tuple[int, Message | None] | None] = queue.SimpleQueue()

    def write(self, credit: int, message: Message | None) -> None:
        self._queue.put((credit, message))

    def read(self) -> tuple[int, Message | None]:
        found = self._queue.get()
        if found is None:
            raise PeerError("closed by the other end")
        credit, message = found
        self.began = time.monotonic_ns()
        if message is None or (self._stream is None and message.ready is None):
            return found
        if self._stream is None and message.ready is not None:
            message.ready.synchronize()
        with self._entered(message):
            return credit, self._arrived(message.with_tensors(self._on_device))

    def close(self) -> None:
        self._queue.put(None)


class WirePort(Port):
    """One end of one direction between two processes.
    GPU tensors travel through pinned host memory, or from GPU to GPU over `nccl`, their own group."""

    def __init__(self, wire: Wire, device: torch.device, nccl: dist.ProcessGroup | None = None) -> None:
        super().__init__(device)
        self._wire, self._nccl = wire, nccl

    def write(self, credit: int, message: Message | None) -> None:
        header, tensors = (b"", []) if message is None else (message.encode(), message.tensors)
        head = bytearray(max(_HEAD, _PREFIX.size + len(header)))
        _PREFIX.pack_into(head, 0, len(header), credit)
        head[_PREFIX.size : _PREFIX.size + len(header)] = header
        parts = [torch.frombuffer(head, dtype=torch.uint8)]
        with self._entered(message):
            for tensor in tensors:
                if not tensor.is_cuda:
                    parts.append(as_bytes(tensor))
                elif self._nccl is None:  # one at a time on the host: a model has thousands of weights
                    self._send([*parts, as_bytes(self._on_host(tensor))])
                    parts = []
            self._send(parts)
            if self._nccl is None:
                return
            for tensor in (tensor for tensor in tensors if tensor.is_cuda):
                if self._stream is not None:  # its memory is not reused until it is sent
                    tensor.record_stream(self._stream)
                # the core of `torch.distributed.send`; its checks cost as much again
                self._nccl.send([self._on_device(tensor).contiguous()], 1 - self._nccl.rank(), 0).wait()
                self.sent += tensor.nbytes

    def read(self) -> tuple[int, Message | None]:
        head = torch.empty(_HEAD, dtype=torch.uint8, device="cpu")
        self._wire.receive([head])
        self.began = time.monotonic_ns()
        length, credit = _PREFIX.unpack_from(head.numpy().data)
        if not length:
            return credit, None
        end = _PREFIX.size + length
        if end > _HEAD:
            rest = torch.empty(end - _HEAD, dtype=torch.uint8, device="cpu")
            self._wire.receive([rest])
            head = torch.cat([head, rest])
        with self._entered():
            return credit, self._arrived(
                decode(head.numpy()[_PREFIX.size : end].tobytes(), self._receive_tensors)
            )

    def close(self) -> None:
        self._wire.close()

    def _receive_tensors(self, expected: Sequence[tuple[list[int], torch.dtype, bool]]) -> list[Tensor]:
        found, beside = [], []
        for shape, dtype, on_gpu in expected:
            if on_gpu and self._nccl is not None:
                found.append(torch.empty(shape, dtype=dtype, device=self._device))
            else:
                found.append(
                    torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._stream is not None)
                )
                beside.append(as_bytes(found[-1]))
        self._wire.receive(beside)
        for tensor, (_, _, on_gpu) in zip(found, expected, strict=True):
            if on_gpu and self._nccl is not None:
                self._nccl.recv([tensor], 1 - self._nccl.rank(), 0).wait()
        return [self._on_device(tensor) for tensor in found]

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Returns a GPU tensor in pinned host memory, after the copy has ended."""
        assert self._stream is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def _send(self, parts: Sequence[Tensor]) -> None:
        self._wire.send(parts)
        self.sent += sum(part.nbytes for part in parts)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's memory, or that of a contiguous copy, as `[n]` uint8."""
    # one element is contiguous with any stride, but only stride 1 can be viewed as bytes
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
