"""Processes: told apart, computing as this one does, and ended while they import."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlora.cluster.processes import Process, _fields, _place

from tests.mlora.stage_runs import ENVIRONMENT
from tests.mlora.stages import stages, until


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as running:
        yield running
        running.kill()


def process_of(child: "subprocess.Popen[bytes]") -> Process:
    return Process("here", child.pid, _place(), int(_fields(child.pid)[19]))


def test_this() -> None:
    me = Process.this()
    assert me.pid == os.getpid()
    assert not me.is_gone()
    assert not me.is_stopped()
    assert replace(me, start=me.start + 1).is_gone(), "a later process got the number"


def test_near() -> None:
    me = Process.this()
    assert me.is_near(replace(me, pid=1, host="renamed"))
    assert not me.is_near(replace(me, place="another boot"))
    assert not replace(me, place="").is_near(replace(me, place=""))


def test_one_that_is_stopped_and_killed(child: "subprocess.Popen[bytes]") -> None:
    process = process_of(child)
    child.send_signal(signal.SIGSTOP)
    assert until(process.is_stopped)
    assert not process.is_gone()
    replace(process, start=process.start + 1).kill(os.getpid())
    process.kill(parent=1)
    assert not process.is_gone(), "only the process that was meant is killed, and only a child of that parent"
    process.kill(os.getpid())
    assert until(process.is_gone), "it has ended, though nobody has collected it"
    assert child.wait() == -signal.SIGKILL
    assert process.is_gone()
    process.kill(os.getpid())


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


SAYS = "import torch, mlora_ext; print(torch.get_num_threads(), torch.ops.mlora_ext.cpu_isa())"


@pytest.fixture
def here() -> str:
    return f"{torch.get_num_threads()} {torch.ops.mlora_ext.cpu_isa()}\n"


@pytest.mark.parametrize("sources", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_programs(here: str, sources: bool) -> None:
    environment = ENVIRONMENT if sources else dict(os.environ)
    done = subprocess.run([sys.executable, "-c", SAYS], env=environment, capture_output=True, text=True)
    assert done.stdout == here, done.stderr


def test_stages(here: str) -> None:
    with stages(SAYS, SAYS) as running:
        codes, outputs, errors = running.end()
    assert (codes, outputs) == ([0, 0], [here, here]), errors


IMPORTING = """
import os, signal, sys
from mlora.cluster.imports import end_imports_at_once
{before}
end_imports_at_once()
try:
    {inside}
except KeyboardInterrupt:
    print("raised")
"""
KILL = "os.kill(os.getpid(), signal.SIGINT)"


def run(folder: Path, inside: str, before: str = "") -> tuple[int, str, str]:
    (folder / "stubborn.py").write_text(
        f"import os, signal\ntry:\n    {KILL}\nexcept BaseException:\n    pass\n"
    )
    (folder / "program.py").write_text(IMPORTING.format(inside=inside, before=before))
    done = subprocess.run([sys.executable, folder / "program.py"], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_while_a_module_is_imported(tmp_path: Path) -> None:
    assert run(tmp_path, "import stubborn; print('went on')") == (130, "", "error: interrupted\n")


def test_elsewhere(tmp_path: Path) -> None:
    assert run(tmp_path, f"{KILL}; print('went on')") == (0, "raised\n", "")


def test_one_that_ignores_it_goes_on(tmp_path: Path) -> None:
    ignores = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    assert run(tmp_path, "import stubborn; print('went on')", ignores) == (0, "went on\n", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "importing alone changes nothing"


def test_ctrl_c_is_heard_before_the_command_line_is_imported() -> None:
    code = """
import signal, sys
import mlora.__main__ as entry

class Probe:
    def find_spec(self, name, path=None, target=None):
        if name == "mlora.cli.app":
            print("typer" in sys.modules, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            sys.exit()

sys.meta_path.insert(0, Probe())
entry.main()
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
