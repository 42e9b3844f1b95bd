"""What an envelope holds comes out of it, whatever its size."""

import pytest
import torch
from mlora.pipeline.envelope import BLOCK, SMALL, is_small, rest_of, seal, split, unseal
from mlora.pipeline.message import Header, Message, MessageType, decode, encode


def through(credit: int, header: bytes, tensors: list[torch.Tensor]) -> tuple[int, bytes, torch.Tensor, int]:
    """Seal and unseal; also how many transfers it took."""
    block, *rest = seal(credit, header, tensors)
    assert len(block) == BLOCK
    assert rest_of(block) == sum(len(part) for part in rest)
    opened = unseal(block, rest[0] if rest else None)
    return opened.credit, opened.header, opened.small, 1 + len(rest)


def test_credit_alone_is_one_transfer() -> None:
    credit, header, small, transfers = through(1 << 40, b"", [])
    assert (credit, header, small.numel(), transfers) == (1 << 40, b"", 0, 1)


@pytest.mark.parametrize("length", [1, 7, 8, 1000, BLOCK - 24, BLOCK - 23, 3 * BLOCK])
def test_headers(length: int) -> None:
    header = bytes(index % 251 for index in range(length))
    found = through(5, header, [])
    assert found[:2] == (5, header)
    assert found[3] == (1 if length <= BLOCK - 24 else 2)


@pytest.mark.parametrize("length", [1, 500, 5000])
def test_messages(length: int) -> None:
    tensors = [
        torch.tensor(3.5, dtype=torch.float64),
        torch.arange(length, dtype=torch.int32)[::2],
        torch.zeros(0, 4),
        torch.randn(3, length).to(torch.bfloat16).T,
        torch.tensor([True, False, True]),
        torch.ones(2, requires_grad=True),
    ]
    assert all(is_small(tensor) for tensor in tensors)
    header, found = encode(Message(MessageType.FORWARD, {"tensors": tensors, "number": 3}))
    _, opened, small, transfers = through(0, header, found)
    assert transfers == (1 if length == 1 else 2)
    came = Header.of(opened)
    assert all(shape.small for shape in came.shapes)
    again = decode(came, split(small, [(shape.shape, shape.dtype) for shape in came.shapes]))
    assert again.number == 3
    for expected, found_again in zip(tensors, again.content["tensors"], strict=True):
        assert found_again.dtype == expected.dtype
        assert torch.equal(found_again, expected.detach())


def test_large_tensors_follow() -> None:
    sizes = [SMALL, SMALL + 1]
    message = Message(
        MessageType.FORWARD, {"tensors": [torch.zeros(size, dtype=torch.uint8) for size in sizes]}
    )
    assert [shape.small for shape in Header.of(encode(message)[0]).shapes] == [True, False]
