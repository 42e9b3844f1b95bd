"""`mlora` on a disk that takes its time while checkpoints are written.

    python slow_disk.py LOG ARGUMENTS...

What the thread that writes checkpoints asks the disk for is a line in LOG, and waits for a random time before
it is done.
"""

import os
import random
import sys
import time
from pathlib import Path

import pytest
from mlora.cli.app import main

from tests.mlora.watched_disk import watch_disk

LONGEST = 0.06  # seconds


def slow_down(log: Path) -> None:
    """Let each request wait."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def told(what: str, path: Path) -> None:
        os.write(descriptor, f"{what} {path.suffix}{path.name.split('-')[0]}\n".encode())
        time.sleep(random.uniform(0.0, LONGEST))

    watch_disk(pytest.MonkeyPatch(), told)


if __name__ == "__main__":
    slow_down(Path(sys.argv[1]))
    sys.argv = ["mlora", *sys.argv[2:]]
    main()
