"""Part `io`: our reads and writes against fio, on the same file."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from mlora.offload.buffers import buffer
from mlora.offload.disk import THREADS, Disk
from mlora_ext._C import PIECE, File, Ticket
from shared.harness import Found, Target, table
from shared.timing import in_order

from offload.base import drop_cached

BYTES, QUICK_BYTES = 2 << 30, 32 << 20
BLOCK, QUICK_BLOCK = 96 << 20, 4 << 20
"""Bytes of one transfer, about a block of a model."""
BUFFERS = 3
"""Transfers under way, as many as a stream has slots."""
DEPTH = 8
PEERS = {"fio, 1 MiB": "1M", "fio, 4 MiB": "4M"}
OURS = ("ours", "ours again")
"""Twice a turn, because fio has two tries, of which the better one counts."""
MUST = 0.9
_PIECE = 32 << 20  # bytes


class Transfers:
    """One file, moved whole by our threads through a few buffers."""

    def __init__(self, path: Path, size: int, block: int) -> None:
        self.size, self._block = size, block
        self._disk, self._file = Disk(), File.create(str(path))
        self._buffers = [buffer(block) for _ in range(BUFFERS)]
        for one in self._buffers:
            one.random_(0, 256)

    @property
    def direct(self) -> bool:
        """Whether the transfers pass the page cache by."""
        return self._file.direct

    def read(self) -> float:
        """Reads the file; returns bytes per second."""
        return self._move(self._disk.read)

    def write(self) -> float:
        """Writes the file; returns bytes per second."""
        return self._move(self._disk.write)

    def _move(self, begin: Callable[[File, int, torch.Tensor, int], Ticket]) -> float:
        started = time.perf_counter()
        waiting: list[Ticket | None] = [None] * len(self._buffers)
        for offset, place in zip(range(0, self.size, self._block), cycle(range(len(waiting))), strict=False):
            if (before := waiting[place]) is not None:
                before.wait()
            size = min(self._block, self.size - offset)
            waiting[place] = begin(self._file, offset, self._buffers[place], size)
        for ticket in waiting:
            if ticket is not None:
                ticket.wait()
        return self.size / (time.perf_counter() - started)


def lay_out(path: Path, size: int) -> None:
    """Writes a file from begin to end through the page cache, as models are, and drops it from there.

    Direct writes by several threads would scatter its extents over the disk.
    """
    content = os.urandom(min(size, _PIECE))
    with path.open("wb") as file:
        for _ in range(0, size, len(content)):
            file.write(content)
    drop_cached(path)


def fio(path: Path, size: int, way: str, block: str) -> float:
    """Returns bytes per second of fio at queue depth 8, past the page cache."""
    options = {
        "name": way,
        "filename": path,
        "rw": way,
        "bs": block,
        "size": size,
        "iodepth": DEPTH,
        "ioengine": "libaio",
        "direct": 1,
        "fallocate": "none",
        "output-format": "json",
    }
    command = ["fio", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"fio failed: {' '.join((done.stderr or done.stdout).split())}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]
    if job["io_bytes"] != size:
        raise RuntimeError(f"fio: expected {size} bytes, it moved {job['io_bytes']}")
    return float(job["bw_bytes"])


def run(options: argparse.Namespace) -> Found:
    """Measures both ways in turns.

    Raises:
        OSError: fio is not installed, or the file system refuses direct transfers.
    """
    if not shutil.which("fio"):
        raise OSError("io: fio is not installed; Debian has it: apt-get install fio")
    path = options.folder / "file"
    size, block = (QUICK_BYTES, QUICK_BLOCK) if options.quick else (BYTES, BLOCK)
    lay_out(path, size)
    ours = Transfers(path, size, block)
    ours.read()
    if not ours.direct:
        raise OSError(f"io: the file system of {options.folder} refuses O_DIRECT; give --folder on another")
    version = subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()
    lines = [
        f"{size >> 20} MiB by transfers of {block >> 20} MiB, {BUFFERS} under way, in pieces of "
        f"{PIECE >> 20} MiB "
        f"by {THREADS} threads; {version} at queue depth {DEPTH}; O_DIRECT; each side has two tries "
        "a turn, and "
        "the better one counts"
    ]
    must, ways = [], {}
    for way in ("read", "write"):
        turns = _turns(ours, path, way, options.turns)
        ratios = [max(one[name] for name in OURS) / max(one[name] for name in PEERS) for one in turns]
        ways[way] = {"turns": turns, "ratios": ratios, "ratio": statistics.median(ratios)}
        rates = {f"{way}: {name}": {"rate": statistics.median(t[name] for t in turns)} for name in turns[0]}
        lines += ["", *table(rates, (("GB/s", "rate", "7.2f", 1e-9),))]
        lines.append(f"{way}: ours / fio's better by turn: {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
        must.append(Target(f"{way}: ours / fio's better, median", ways[way]["ratio"], least=MUST))
    shape = {"bytes": size, "block": block, "buffers": BUFFERS, "threads": THREADS, "piece": PIECE}
    return Found({"fio": version, "depth": DEPTH, **shape, "ways": ways}, lines, must)


def _turns(ours: Transfers, path: Path, way: str, turns: int) -> list[dict[str, float]]:
    """Returns bytes per second of all in turns, after one that does not count."""
    mine = ours.read if way == "read" else ours.write
    cases: dict[str, Callable[[], float]] = {}
    for name, (peer, block) in zip(OURS, PEERS.items(), strict=True):
        cases[name] = mine
        cases[peer] = partial(fio, path, ours.size, way, block)
    found = []
    for turn in range(1 + turns):
        os.sync()
        rates = {name: cases[name]() for name in in_order(cases, turn)}
        if turn:
            found.append(rates)
    return found
