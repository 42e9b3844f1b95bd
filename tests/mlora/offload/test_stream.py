"""Which blocks are in memory, what is read when, failed reads, and memory for transfers."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import pytest
import torch
from mlora.offload import disk as disks
from mlora.offload.block_layout import BlockLayout, StoredTensor
from mlora.offload.buffers import ALIGN, SLAB, Slabs, aligned, buffer
from mlora.offload.disk import Disk
from mlora.offload.stream import BlockStream

COUNT = 6
SHAPE = (37, 11)


def stored(tmp_path: Path, disk: Disk, blocks: int = COUNT) -> tuple[Path, list[BlockLayout]]:
    """A file of one matrix and one vector for each block, at odd offsets."""
    path = tmp_path / "weights"
    numbers = [torch.full(SHAPE, float(block)) for block in range(blocks)]
    sizes = [matrix.nbytes + 12 for matrix in numbers]
    header = bytes(40)
    content = header + b"".join(m.numpy().tobytes() + torch.arange(3.0).numpy().tobytes() for m in numbers)
    path.write_bytes(content)
    file = disk.open(path)
    layouts = []
    for block in range(blocks):
        begin = len(header) + sum(sizes[:block])
        matrix = StoredTensor(file, begin, torch.float32, SHAPE)
        vector = StoredTensor(file, begin + matrix.nbytes, torch.float32, (3,))
        layouts.append(BlockLayout({"matrix": matrix, "vector": vector}))
    return path, layouts


def assert_right(stream: BlockStream, block: int) -> None:
    found = stream.tensors(block)
    assert torch.equal(found["matrix"], torch.full(SHAPE, float(block)))
    assert torch.equal(found["vector"], torch.arange(3.0))


def test_tensors_that_touch_are_read_at_once_and_others_apart(tmp_path: Path) -> None:
    disk = Disk()
    _, layouts = stored(tmp_path, disk)
    assert [len(layout.ranges) for layout in layouts] == [1] * COUNT
    file = layouts[0].tensors["matrix"].file
    far = BlockLayout(
        {
            "a": StoredTensor(file, 0, torch.uint8, (10,)),
            "b": StoredTensor(file, 3 * ALIGN, torch.uint8, (ALIGN + 1,)),
        }
    )
    assert [(one.offset, one.size, one.place) for one in far.ranges] == [
        (0, 10, 0),
        (3 * ALIGN, ALIGN + 1, ALIGN),
    ]
    assert far.nbytes == 3 * ALIGN


@pytest.mark.parametrize("slots", [2, 3, 4, 9])
def test_each_pass_reads_what_did_not_stay_at_the_turn(tmp_path: Path, slots: int) -> None:
    """A forward pass leaves its last blocks, a backward pass its first: next-use eviction."""
    disk = Disk([tmp_path])
    layouts = stored(tmp_path, disk)[1]
    stream = BlockStream(layouts, disk, slots, poison=True)
    assert stream.nbytes == min(slots, COUNT) * max(layout.nbytes for layout in layouts)
    loads = []
    for _ in range(3):
        for one_pass in (range(COUNT), reversed(range(COUNT))):
            before = stream.loads
            for block in one_pass:
                assert_right(stream, block)
                assert_right(stream, block)
            loads.append(stream.loads - before)
    missing = max(0, COUNT - slots)
    assert loads[1:] == [missing] * 5
    assert loads[0] == COUNT


def test_any_order_gives_the_right_tensors(tmp_path: Path) -> None:
    disk = Disk([tmp_path])
    stream = BlockStream(stored(tmp_path, disk)[1], disk, 3, poison=True)
    for block in torch.randint(COUNT, (200,)).tolist():
        assert_right(stream, block)


def test_a_tensor_that_is_used_too_late_is_nan(tmp_path: Path) -> None:
    disk = Disk([tmp_path])
    stream = BlockStream(stored(tmp_path, disk)[1], disk, 2, poison=True)
    kept = stream.tensors(0)["matrix"]
    for block in range(1, COUNT):
        stream.tensors(block)
    assert kept.isnan().all() or not torch.equal(kept, torch.zeros(SHAPE))


def test_a_prefetch_takes_no_block_that_is_needed_sooner(tmp_path: Path) -> None:
    disk = Disk([tmp_path])
    stream = BlockStream(stored(tmp_path, disk)[1], disk, 3)
    assert_right(stream, 0)
    before = stream.loads
    stream.prefetch(5)
    stream.prefetch(1)
    assert stream.loads == before
    assert_right(stream, 1)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    disk = Disk([tmp_path])
    path, layouts = stored(tmp_path, disk, 40)
    whole = path.read_bytes()
    stream = BlockStream(layouts, disk, 2, poison=True)
    assert_right(stream, 0)
    os.truncate(path, len(whole) // 2)
    with pytest.raises(OSError, match=r"reading \d+ bytes at offset \d+(: the file was w| ended)") as error:
        all(stream.tensors(block) for block in range(1, 40))
    assert error.value.filename == str(path)
    with pytest.raises(OSError, match="ended after"):
        stream.tensors(39)
    path.write_bytes(whole)
    with pytest.raises(OSError, match="the file was written since it was opened"):
        stream.tensors(38)


def test_fewer_than_two_slots_are_refused(tmp_path: Path) -> None:
    disk = Disk([tmp_path])
    with pytest.raises(ValueError, match="slots: expected at least 2 slots and 1 block, got 1 and 6"):
        BlockStream(stored(tmp_path, disk)[1], disk, 1)


def test_a_file_system_without_direct_reads_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(ALIGN))
    inner = disks.File

    class Buffered:
        open = staticmethod(lambda path: inner.open(path, False))

    monkeypatch.setattr(disks, "File", Buffered)
    disk = Disk([tmp_path])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        disk.open(tmp_path / "file")
        disk.open(tmp_path / "file")
    assert [str(one.message).partition(";")[0] for one in caught] == [
        f"offload: {tmp_path}/file is on a file system without direct reads and writes"
    ]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot be opened") as error:
        Disk([tmp_path / "gone"]).scratch(ALIGN)
    assert error.value.filename == str(tmp_path / "gone")


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
