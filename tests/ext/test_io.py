"""Reads and writes of files by threads without Python's lock."""

import errno
import gc
import mmap
import os
import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from mlora_ext import _C

ALIGN, PIECE = _C.ALIGN, _C.PIECE


def buffer(size: int) -> torch.Tensor:
    """Bytes whose address is a multiple of `ALIGN`, rounded up to one."""
    return torch.frombuffer(mmap.mmap(-1, max(ALIGN, -(-size // ALIGN) * ALIGN)), dtype=torch.uint8)


def noise(size: int) -> torch.Tensor:
    found = buffer(size)
    return found.copy_(torch.randint(0, 256, found.shape, dtype=torch.uint8))


def read(pool: _C.Pool, file: _C.File, offset: int, size: int) -> torch.Tensor:
    into = buffer(size)
    pool.read(file, offset, into.data_ptr(), size, into).wait()
    return into[:size]


@pytest.fixture
def pool() -> _C.Pool:
    return _C.Pool(3)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, ALIGN, PIECE - 1, 3 * PIECE + 12345])
def test_a_file_is_read_up_to_its_end(tmp_path: Path, pool: _C.Pool, size: int, direct: bool) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    file = _C.File.open(str(tmp_path / "file"), direct)
    assert bytes(read(pool, file, 0, size).numpy()) == content
    if size > 2 * ALIGN:
        assert bytes(read(pool, file, 2 * ALIGN, size - 2 * ALIGN).numpy()) == content[2 * ALIGN :]
    assert file.size == size


@pytest.mark.parametrize("folders", [1, 2, 3])
def test_scratch_files_are_striped_over_folders_and_leave_nothing(
    tmp_path: Path, pool: _C.Pool, folders: int
) -> None:
    places = [tmp_path / str(index) for index in range(folders)]
    for place in places:
        place.mkdir()
    size = 7 * PIECE + 3 * ALIGN
    file = _C.File.scratch([str(place) for place in places], size)
    content = noise(size)
    ticket = pool.write(file, 0, content.data_ptr(), size, content)
    ticket.wait()
    begin, end = ticket.span
    assert ticket.done
    assert 0 < begin < end <= time.monotonic()
    offset = 5 * PIECE - ALIGN
    assert torch.equal(read(pool, file, offset, 2 * PIECE), content[offset : offset + 2 * PIECE])
    assert torch.equal(read(pool, file, 0, size), content)
    assert [list(place.iterdir()) for place in places] == [[]] * folders


def test_a_written_file_keeps_what_was_written(tmp_path: Path, pool: _C.Pool) -> None:
    content = noise(2 * ALIGN)
    file = _C.File.create(str(tmp_path / "file"))
    pool.write(file, ALIGN, content.data_ptr(), 2 * ALIGN, content).wait()
    file.sync()
    assert (tmp_path / "file").read_bytes() == bytes(ALIGN) + bytes(content.numpy())


def test_an_error_names_file_offset_and_cause(tmp_path: Path, pool: _C.Pool) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(ALIGN))
    file, into = _C.File.open(str(path)), buffer(2 * ALIGN)
    with pytest.raises(
        OSError, match=r"reading 8192 bytes at offset 0 ended after 4096; the file was trunc"
    ) as one:
        pool.read(file, 0, into.data_ptr(), 2 * ALIGN, into).wait()
    assert (one.value.errno, one.value.filename) == (errno.EIO, str(path))
    with pytest.raises(OSError, match=r"writing 4096 bytes at offset 0 failed: Bad file descriptor") as two:
        pool.write(file, 0, into.data_ptr(), ALIGN, into).wait()
    assert (two.value.errno, two.value.filename) == (errno.EBADF, str(path))
    with pytest.raises(FileNotFoundError, match="cannot be opened"):
        _C.File.open(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="offset and address: expected multiples of 4096, got 8 and"):
        pool.read(file, 8, into.data_ptr(), ALIGN, into)
    assert bytes(read(pool, file, 0, ALIGN).numpy()) == bytes(ALIGN)


def test_a_file_that_is_written_after_it_was_opened_is_an_error(tmp_path: Path, pool: _C.Pool) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * ALIGN))
    file = _C.File.open(str(path))
    assert not read(pool, file, 0, ALIGN).any()
    time.sleep(0.02)  # a file system keeps times in steps of some milliseconds
    with path.open("r+b") as other:
        other.write(b"1")
    with pytest.raises(OSError, match="offset 0: the file was written since it was opened") as error:
        read(pool, file, 0, ALIGN)
    assert error.value.filename == str(path)


def test_a_file_larger_than_allowed_is_an_error(tmp_path: Path, pool: _C.Pool) -> None:
    """As on a full disk: the system refuses to make the file longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    content = noise(2 * PIECE)
    file = _C.File.create(str(tmp_path / "file"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE, before[1]))
    try:
        ticket = pool.write(file, 0, content.data_ptr(), 2 * PIECE, content)
        with pytest.raises(OSError, match=rf"writing {PIECE} bytes at offset {PIECE} failed: File too large"):
            ticket.wait()
        with pytest.raises(
            OSError, match="no scratch file of 8388608 bytes can be made there: File too large"
        ):
            _C.File.scratch([str(tmp_path)], 2 * PIECE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "file").stat().st_size == PIECE


def test_python_runs_while_others_read(tmp_path: Path) -> None:
    """A slow transfer holds neither Python's lock nor its memory free."""
    pool = _C.Pool(2, rate=8 * PIECE)
    file = _C.File.scratch([str(tmp_path)], 4 * PIECE)
    content = noise(4 * PIECE)
    begin, steps = time.monotonic(), 0
    ticket = pool.write(file, 0, content.data_ptr(), 4 * PIECE, content)
    while not ticket.done:
        steps += 1
        time.sleep(0.001)
    assert time.monotonic() - begin >= 0.49
    assert steps > 50
    waits = pool.read(file, 0, content.data_ptr(), 4 * PIECE, content)
    waiting = threading.Thread(target=waits.wait)
    waiting.start()
    assert waiting.is_alive()
    waiting.join()
    assert pool.cpu_seconds > 0


def test_a_dropped_ticket_waits_for_its_memory(tmp_path: Path) -> None:
    pool = _C.Pool(1, rate=4 * PIECE)
    file = _C.File.scratch([str(tmp_path)], PIECE)
    content = noise(PIECE)
    begin = time.monotonic()
    pool.write(file, 0, content.data_ptr(), PIECE, content)
    del content
    gc.collect()
    assert time.monotonic() - begin >= 0.24


def test_a_pool_ends_its_transfers_before_it_goes(tmp_path: Path) -> None:
    file, content = _C.File.create(str(tmp_path / "file")), noise(8 * ALIGN)
    ticket = _C.Pool(1).write(file, 0, content.data_ptr(), 8 * ALIGN, content)
    ticket.wait()
    assert (tmp_path / "file").read_bytes() == bytes(content.numpy())
    with pytest.raises(ValueError, match="threads, rate: expected at least 1 and at least 0, got 0 and"):
        _C.Pool(0)
