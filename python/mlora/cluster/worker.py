"""``python -m mlora.cluster.worker PID ...`` runs a Python command in a process of its own.

`mlora.cluster.launch` starts it. It ends with its parent process PID, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # prctl's parameter, <sys/prctl.h>


def end_with_parent(parent: int) -> None:
    """Makes Linux kill this process once its parent has ended, at once if it has; elsewhere does nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Runs the command that follows the parent's number: `-m MODULE ...` or `FILE ...`."""
    end_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    if sys.argv[0] != "-m":
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))  # as `python FILE` does
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
