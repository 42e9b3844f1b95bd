"""``python -m mlora.cluster.worker PID ...``: a Python command in a process of its own.

:mod:`mlora.cluster.launch` starts it. It ends with the process PID that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # prctl's parameter, <sys/prctl.h>


def end_with_parent(parent: int) -> None:
    """Have the system kill this process as soon as its parent has ended.

    Elsewhere than on Linux nothing happens.

    Args:
        parent: the parent's process number; when it has ended already, so does this process.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run the command that follows the parent's number: ``-m MODULE ...`` or ``FILE ...``."""
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
