"""The envelope that begins a message on the wire: a block of fixed size, then the rest in one piece.

An envelope is `[3]` int64 (bytes of the header, bytes of small tensors, credit), the header, and the small
tensors of the host's memory, each aligned to 8 bytes. A message with one large tensor takes two transfers in
all; each transfer costs a wake-up of both sides.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 2048
SMALL = 1 << 16
_PREFIX = struct.Struct("<qqq")
_ALIGNED = 8


class Opened(NamedTuple):
    """The content of an envelope.

    Attributes:
        header: empty if credit came alone.
        small: bytes of the small tensors.
        credit: bytes.
    """

    header: bytes
    small: Tensor
    credit: int


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor travels inside the envelope."""
    return not tensor.is_cuda and tensor.nbytes <= SMALL


def seal(credit: int, header: bytes = b"", tensors: Sequence[Tensor] = ()) -> list[Tensor]:
    """Makes an envelope (credit alone, without a header): its block, and the rest if any; `[n]` uint8."""
    room = sum(_padded(tensor.nbytes) for tensor in tensors)
    begin = _padded(_PREFIX.size + len(header))
    whole = bytearray(max(begin + room, BLOCK))
    _PREFIX.pack_into(whole, 0, len(header), room, credit)
    whole[_PREFIX.size : _PREFIX.size + len(header)] = header
    for tensor in tensors:
        whole[begin : begin + tensor.nbytes] = as_bytes(tensor).numpy().data
        begin += _padded(tensor.nbytes)
    sealed = torch.frombuffer(whole, dtype=torch.uint8)
    return [sealed] if len(whole) == BLOCK else [sealed[:BLOCK], sealed[BLOCK:]]


def rest_of(block: Tensor) -> int:
    """Returns how many bytes of the envelope follow its block."""
    header, room, _ = _PREFIX.unpack_from(block.numpy().data)
    return max(0, _padded(_PREFIX.size + header) + room - BLOCK)


def unseal(block: Tensor, rest: Tensor | None) -> Opened:
    """Opens an envelope, given its `[BLOCK]` uint8 block and the rest, if any."""
    length, room, credit = _PREFIX.unpack_from(block.numpy().data)
    whole = block if rest is None else torch.cat([block, rest])
    begin = _padded(_PREFIX.size + length)
    header = whole.numpy()[_PREFIX.size : _PREFIX.size + length].tobytes()
    return Opened(header, whole[begin : begin + room], credit)


def split(small: Tensor, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Copies the small tensors out of an envelope's bytes; `wanted` has their shapes and dtypes, in order."""
    found, begin = [], 0
    for shape, dtype in wanted:
        tensor = torch.empty(shape, dtype=dtype)
        as_bytes(tensor).copy_(small[begin : begin + tensor.nbytes])
        begin += _padded(tensor.nbytes)
        found.append(tensor)
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the tensor's memory, or that of a contiguous copy, as `[n]` uint8."""
    # one element is contiguous with any stride, but only stride 1 can be viewed as bytes
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
