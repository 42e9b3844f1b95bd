"""Messages between neighbouring stages: a small header of plain values and records, and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..records import fields_of, made

_MARK, _RECORD = "mlora.tensor", "mlora.record"


class MessageType(StrEnum):
    """The kinds of messages."""

    FORWARD = "forward"
    BACKWARD = "backward"
    CONTROL = "control"
    REPLY = "reply"
    END = "end"
    FAULT = "fault"


@dataclass(eq=False)
class Message:
    """One message. Its content must not change, because properties are cached."""

    sort: MessageType
    # plain values, lists, dictionaries, tensors and records (`mlora.records`)
    content: dict[str, Any] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None  # recorded on a GPU once the tensors are computed or have arrived

    @property
    def number(self) -> int:
        """The micro-batch's number, or -1."""
        return int(self.content.get("number", -1))

    @cached_property
    def flat(self) -> tuple[str, list[Tensor]]:
        """The content as JSON with marks for tensors, and the tensors; TypeError for what JSON lacks."""
        _check_keys(self.content)
        tensors: list[Tensor] = []

        def mark(value: object) -> dict[str, Any]:
            if isinstance(value, Tensor):
                tensors.append(value)
                return {_MARK: len(tensors) - 1}
            found = fields_of(value)
            if found is None:
                raise TypeError(f"message: expected plain values and tensors, got {type(value).__name__}")
            kind, values = found
            _check_keys(values)
            return {_RECORD: kind, **values}

        return json.dumps(self.content, default=mark, separators=(",", ":")), tensors

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the content, in order."""
        return self.flat[1]

    @cached_property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def record(self) -> None:
        """Records, by a GPU event in the current stream, when the tensors are computed."""
        device = next((tensor.device for tensor in self.tensors if tensor.is_cuda), None)
        if device is not None:
            self.ready = torch.cuda.Event()
            self.ready.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Makes the current stream of a GPU wait for the tensors."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.ready.device)
            stream.wait_event(self.ready)
            for tensor in self.tensors:
                if tensor.is_cuda:
                    tensor.record_stream(stream)

    def encode(self) -> bytes:
        """Returns the header: a line that describes the tensors, then the content with marks."""
        table = [[str(t.dtype).removeprefix("torch."), t.is_cuda, *t.shape] for t in self.tensors]
        return f"{json.dumps([self.sort, table])}\n{self.flat[0]}".encode()

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Message:
        """Returns a copy with `change` applied to each tensor; tuples become lists."""
        return _built(self.sort, self.flat[0], [change(tensor) for tensor in self.tensors])


def decode(
    header: bytes, receive: Callable[[list[tuple[list[int], torch.dtype, bool]]], Sequence[Tensor]]
) -> Message:
    """Rebuilds a message. `receive` returns its tensors, given shape, dtype and whether it left a GPU."""
    first, content = header.split(b"\n", 1)
    sort, table = json.loads(first)
    tensors = receive([(shape, getattr(torch, dtype), on_gpu) for dtype, on_gpu, *shape in table])
    return _built(MessageType(sort), content, tensors)


def _check_keys(value: object) -> None:
    """Raises TypeError for a key that would arrive as another one: JSON has text only."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key in (_MARK, _RECORD):
                raise TypeError(f"message: expected text keys, except {_MARK!r} and {_RECORD!r}, got {key!r}")
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_keys(inner)


def _built(sort: MessageType, content: str | bytes, tensors: Sequence[Tensor]) -> Message:
    def unmark(value: dict[str, Any]) -> Any:
        if value.keys() == {_MARK}:
            return tensors[value[_MARK]]
        return made(value.pop(_RECORD), value) if _RECORD in value else value

    return Message(sort, json.loads(content, object_hook=unmark))
