"""Memory for transfers: pages are used again, but never while a tensor lies in them."""

from __future__ import annotations

import gc

import pytest
import torch
from mlora.offload.buffers import ALIGN, SLAB, Slabs, aligned, buffer


@pytest.mark.parametrize("size", [0, 1, ALIGN, ALIGN + 1, 5 << 20])
def test_a_buffer_is_aligned_and_zero(size: int) -> None:
    content = buffer(size)
    assert content.data_ptr() % ALIGN == 0
    assert content.nbytes == max(ALIGN, aligned(size))
    assert not content.any()


def test_areas_do_not_overlap_while_a_view_of_them_lives() -> None:
    slabs = Slabs()
    size = 3 << 20
    kept = [slabs.take(size)[5:].fill_(number) for number in range(25)]
    gc.collect()
    for number, content in enumerate(kept):
        assert content.eq(number).all()


def test_pages_are_used_again_when_no_tensor_lies_in_them() -> None:
    slabs = Slabs()
    addresses = set()
    for _ in range(50):
        pair = [slabs.take(SLAB // 2) for _ in range(2)]
        addresses |= {content.data_ptr() for content in pair}
        del pair
    assert len(addresses) == 2


def test_one_live_tensor_keeps_its_slab() -> None:
    slabs = Slabs()
    kept = slabs.take(SLAB // 4).fill_(1)
    for _ in range(20):
        slabs.take(SLAB // 2).fill_(2)
    assert kept.eq(1).all()


def test_an_area_larger_than_a_slab_is_used_again_too() -> None:
    slabs = Slabs()
    slabs.take(ALIGN)
    addresses = set()
    for _ in range(5):
        large = slabs.take(2 * SLAB + 1).fill_(1)
        assert large.nbytes == aligned(2 * SLAB + 1)
        other = slabs.take(SLAB).fill_(2)
        assert large.eq(1).all()
        addresses |= {large.data_ptr(), other.data_ptr()}
        del large, other
    assert len(addresses) == 2
    assert slabs.nbytes == aligned(2 * SLAB + 1) + SLAB


def test_memory_outlives_the_slabs() -> None:
    content = Slabs().take(ALIGN).fill_(7)
    gc.collect()
    torch.full((1 << 20,), 9)
    assert content.eq(7).all()
