"""Reads tensors of a safetensors file while other threads run."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_PIECE = 16 << 20  # bytes of one read
_LARGE = 1 << 20  # bytes; from here on a tensor gets its own mapping, which leaves no hole after a cast
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile(AbstractContextManager["TensorFile"]):
    """A safetensors file, read by tensor name; SafetensorError if it is not a whole one.

    `safe_open` would hold Python's lock while it reads a tensor, and the process could send no heartbeat
    while a large one comes from a slow disk. Pages of a mapped file would count as the process's memory,
    beside the tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with safe_open(path, framework="pt", backend="pread"):
            pass  # it checks the header and the length
        self._path = os.fspath(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        (length,) = struct.unpack("<Q", self._file.read(8))
        self._begin = 8 + length
        self._entries: dict[str, Any] = json.loads(self._file.read(length))
        self._entries.pop("__metadata__", None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def keys(self) -> Iterable[str]:
        return self._entries.keys()

    def kind(self, key: str) -> str:
        """Returns the name of a tensor's dtype in the file, such as `BF16`."""
        return str(self._entries[key]["dtype"])

    def places(self) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        """Returns offset in the file, dtype and shape of each tensor whose dtype torch has, by key."""
        return {
            key: (self._begin + entry["data_offsets"][0], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for key, entry in self._entries.items()
            if entry["dtype"] in _DTYPES
        }

    def read(self, key: str) -> Tensor:
        """Reads a tensor into memory of its own; ValueError if torch lacks its dtype."""
        entry = self._entries[key]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{self._path}: {key}: torch has no dtype {entry['dtype']}")
        shape, dtype = entry["shape"], _DTYPES[entry["dtype"]]
        place, end = (self._begin + offset for offset in entry["data_offsets"])
        if place == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        size = end - place
        buffer = mmap.mmap(-1, size) if size >= _LARGE else bytearray(size)
        view = memoryview(buffer)
        while view:
            count = os.preadv(self._file.fileno(), [view[:_PIECE]], place)
            if not count:
                raise OSError(f"{self._path}: ends before {key} does")
            place, view = place + count, view[count:]
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape)
