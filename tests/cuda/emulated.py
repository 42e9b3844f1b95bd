"""Builds the CUDA kernels and their launcher for the CPU, with `emulator.h` in place of the machine.

Loading the result gives the `cuda_*` operators to CPU tensors.
"""

import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils import cpp_extension

import mlora_ext  # noqa: F401  (declares the operators)

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emulated"
HERE = Path(__file__).parent
KERNELS = sorted((ROOT / "csrc/cuda").glob("*.cu"))
SOURCES = [
    *KERNELS,
    *(ROOT / f"csrc/cuda/{name}.cpp" for name in ("operator", "tickets")),
    *HERE.glob("emulator*.cpp"),
]
FLAGS = [
    "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas",
    "-DMLORA_EMULATE", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL",
]  # fmt: skip


def missing() -> str:
    """What the emulator lacks here; empty if nothing."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "needs Linux on x86-64"
    return "" if shutil.which("g++") else "needs g++"


def build() -> Path:
    """The library, compiled unless these very sources have been; others are removed."""
    headers = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cuh"), *HERE.glob("emulator*")]
    digest = hashlib.sha256(" ".join([torch.__version__, *FLAGS]).encode())
    for path in sorted({*headers, *SOURCES}):
        digest.update(path.read_bytes())
    library = BUILD / f"{digest.hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:  # of several test processes one builds, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    folders = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    compiler = ["g++", *FLAGS, f"-I{ROOT / 'csrc'}", f"-I{HERE}", *folders]
    with tempfile.TemporaryDirectory(dir=BUILD) as folder, ThreadPoolExecutor(2) as pool:

        def compile_one(source: Path) -> Path:
            out = Path(folder) / f"{source.stem}.o"
            subprocess.run([*compiler, "-x", "c++", "-c", source, "-o", out], check=True)
            return out

        objects = list(pool.map(compile_one, SOURCES))
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        linked = Path(folder) / library.name
        link = ["g++", "-shared", *objects, *libraries, "-Wl,--no-as-needed", "-ltorch", "-o", linked]
        subprocess.run(link, check=True)
        for other in BUILD.glob("*.so"):
            other.unlink(missing_ok=True)
        linked.rename(library)


class Launch(NamedTuple):
    """One launch. Sectors are of 32 bytes, each counted once: what must come from memory, or go there.

    Attributes:
        name: of the kernel.
        programs: blocks of threads.
        read: bytes that the programs read.
        read_once: bytes of the sectors that were read.
        written: bytes that the programs wrote.
        written_once: bytes of the sectors that were written.
        busiest: matrix instructions (mma) of each program's busiest warp.
    """

    name: str
    programs: int
    read: int
    read_once: int
    written: int
    written_once: int
    busiest: int


@contextmanager
def watched() -> Iterator[list[Launch]]:
    """Yields a list that holds the launches of the emulator, once the context is left."""
    library = ctypes.CDLL(str(build()))
    library.mlora_emulator_log.restype = ctypes.c_char_p
    launches: list[Launch] = []
    library.mlora_emulator_watch(True)
    try:
        yield launches
        for line in library.mlora_emulator_log().decode().splitlines():
            name, *numbers = line.split()
            launches.append(Launch(name, *map(int, numbers)))
    finally:
        library.mlora_emulator_watch(False)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Leaves launches out: what remains is the host's part of a call."""
    library = ctypes.CDLL(str(build()))
    library.mlora_emulator_skip(True)
    try:
        yield
    finally:
        library.mlora_emulator_skip(False)


def fail_next(launch: str) -> None:
    """The next launch of this name ends with an error after half of its programs."""
    ctypes.CDLL(str(build())).mlora_emulator_fail(launch.encode())


@contextmanager
def broken(
    operation: str, threads: range = range(1024), call: int = -1, launch: str = ""
) -> Iterator[Callable[[], str]]:
    """Leaves out an operation of `emulator_hopper.h`, or a wait; what it yields says what was noticed.

    Args:
        operation: its name, such as `barrier_wait`.
        threads: of a block.
        call: which one of each thread; -1: each.
        launch: in launches of this name; default: in all.
    """
    library = ctypes.CDLL(str(build()))
    library.mlora_emulator_found.restype = ctypes.c_char_p
    library.mlora_emulator_break(operation.encode(), launch.encode(), threads.start, threads.stop, call)
    try:
        yield lambda: library.mlora_emulator_found().decode()
    finally:
        library.mlora_emulator_break(b"", b"", 0, 0, -1)


@contextmanager
def shared_memory(kibibytes: int) -> Iterator[None]:
    """Gives blocks so much shared memory, as some devices do."""
    library = ctypes.CDLL(str(build()))
    library.mlora_emulator_limit(kibibytes * 1024)
    try:
        yield
    finally:
        library.mlora_emulator_limit(227 * 1024)


@contextmanager
def no_hopper() -> Iterator[None]:
    """Makes the device one before sm_90: without clusters."""
    library = ctypes.CDLL(str(build()))
    library.mlora_emulator_hopper(False)
    try:
        yield
    finally:
        library.mlora_emulator_hopper(True)


@contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Gives the device so many; with one of them, a program walks over all columns of its tile."""
    library = ctypes.CDLL(str(build()))
    library.mlora_emulator_multiprocessors(count)
    try:
        yield
    finally:
        library.mlora_emulator_multiprocessors(132)


def load() -> None:
    """Register the emulated operators for CPU tensors, once per process."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("mlora_ext::cuda_plan", "CPU"):
        torch.ops.load_library(build())
