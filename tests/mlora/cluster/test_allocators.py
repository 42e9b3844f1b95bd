"""Freed memory that is needed again is not mapped again."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from mlora.cluster.allocators import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
SIZE = 12 << 20

def step():
    blocks = [ctypes.c_void_p(libc.malloc(SIZE)) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in reversed(blocks):
        libc.free(block)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> tuple[str, int]:
    """What `keep_freed_memory` returned, and page faults of ten steps that take and free 96 MiB."""
    environment = {key: value for key, value in os.environ.items() if key[:6] not in ("MALLOC", "GLIBC_")}
    command = [sys.executable, "-c", PROGRAM, how]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    kept, count = output.stdout.split()
    return kept, int(count)


def test_pages_are_mapped_once() -> None:
    kept, few = faults("keep")
    if kept != "True":
        pytest.skip("not glibc's malloc")
    _, many = faults("leave")
    assert many > 100, "malloc kept the memory by itself: this test shows nothing"
    assert few <= many / 10, f"{few} page faults with freed memory kept, {many} without"
