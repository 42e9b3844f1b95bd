"""A process is told from a later one of its number, and looked at and ended by others."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from mlora.cluster.processes import Process, _fields, _place

from tests.mlora.stages import until


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
