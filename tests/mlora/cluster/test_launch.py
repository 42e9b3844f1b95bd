"""`launch` starts one process per stage, passes signals on, and leaves none behind.

`test_attend.py` has what it does when, in simulated time.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlora.cluster.launch import launch
from mlora.cluster.signals import OTHERS

from tests.mlora.stage_runs import ENVIRONMENT
from tests.mlora.stages import Program, is_alive, program, state_of, until

NIGHTLY = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
LAUNCHER = """
import sys
from mlora.cluster import launch
os.environ.pop("OMP_NUM_THREADS", None)
launch._GRACE = {grace}
sys.exit(launch.launch({stages}, {command}))
"""
HEAD = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
folder = Path(sys.argv[1])
(folder / f"{rank}.pid").write_text(str(os.getpid()))
"""
PIPELINE = """
from mlora.cluster.watchdog import Watch
from mlora.cluster.world import World
if rank:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
caught = []
if not rank:
    signal.signal(signal.SIGINT, lambda *_: caught.append(1))
world = World.from_launcher()
with Watch(world, lambda: "a") as watch:
    world.agree({"path": sys.argv[1]})
    (folder / f"{rank}.ready").touch()
    while not (caught or world.store.check(["end"])):
        time.sleep(0.05)
    if not rank:
        time.sleep(2)
        (folder / "checkpoint").touch()
        world.store.set("end", "")
sys.exit(130 if caught else 0)
"""
ORDERLY = """
caught = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN if rank else lambda number, _: caught.append(number))
(folder / f"{rank}.ready").touch()
while not (caught or (folder / "checkpoint").exists()):
    time.sleep(0.02)
if not rank:
    time.sleep(0.5)
    (folder / "checkpoint").touch()
sys.exit(128 + caught[0] if caught else 0)
"""
JOB = """
from mlora.cluster.signals import ending, ending_signals
if rank:
    for number in ending():
        signal.signal(number, signal.SIG_IGN)
with ending_signals() if not rank else open(os.devnull) as caught:
    (folder / f"{rank}.ready").touch()
    while not (rank or caught) and not (folder / "checkpoint").exists():
        time.sleep(0.02)
    time.sleep(1.0)
    (folder / "checkpoint").touch()
sys.exit(0 if rank else 128 + caught[0])
"""
HANGS = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
(folder / f"{rank}.ready").touch()
time.sleep(60)
"""


@contextmanager
def launched(folder: Path, body: str, stages: int = 2, grace: float = 20.0) -> Iterator[Program]:
    """A launcher at work."""
    script = folder / "script.py"
    script.write_text(HEAD + body)
    command = [str(script), str(folder)]
    try:
        with program(LAUNCHER.format(grace=grace, stages=stages, command=command), ENVIRONMENT) as running:
            yield running
    finally:
        assert until(lambda: not any(is_alive(pid) for pid in pids(folder)), 5), "processes are left"


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def are_ready(folder: Path, stages: int = 2) -> bool:
    return until(lambda: len(list(folder.glob("*.ready"))) == stages)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("", 0),
        ("sys.exit(3 if rank else 0)", 3),
        ("sys.exit(0 if rank else 130)", 130),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank else 0", 137),
    ],
    ids=["ends", "fails", "interrupted", "killed"],
)
def test_exit_code_is_that_of_the_process_that_fails(tmp_path: Path, body: str, code: int) -> None:
    with launched(tmp_path, body) as process:
        assert process.end() == (code, "", "")
    assert len(pids(tmp_path)) == 2


def test_processes_share_the_cores(tmp_path: Path) -> None:
    with launched(tmp_path, "os.write(1, (os.environ['OMP_NUM_THREADS'] + '\\n').encode())") as process:
        _, output, _ = process.end()
    assert output == f"{max(1, len(os.sched_getaffinity(0)) // 2)}\n" * 2


@pytest.mark.parametrize("body", [ORDERLY, pytest.param(PIPELINE, marks=pytest.mark.nightly)], ids=len)
def test_first_signal_ends_the_run_in_order(tmp_path: Path, body: str) -> None:
    with launched(tmp_path, body) as process:
        assert are_ready(tmp_path), process.end(1)
        process.signal(signal.SIGINT)
        assert process.end() == (130, "", "")
    assert (tmp_path / "checkpoint").exists()


def test_a_signal_to_all_processes_of_a_job_is_one(tmp_path: Path) -> None:
    """systemd and Slurm send it to each; the launcher passes it on to stage 0 as well."""
    with launched(tmp_path, JOB) as process:
        assert are_ready(tmp_path), process.end(1)
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGTERM)
        process.signal(signal.SIGTERM)
        assert process.end() == (128 + signal.SIGTERM, "", "")
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.nightly
def test_second_signal_kills(tmp_path: Path) -> None:
    with launched(tmp_path, HANGS) as process:
        assert are_ready(tmp_path)
        process.signal(signal.SIGINT)
        time.sleep(2)
        assert process.code is None
        process.signal(signal.SIGINT)
        code, _, error = process.end(15)
        assert code != 0
        assert error == ""


@pytest.mark.nightly
def test_killed_stage_is_told_once_and_ends_all(tmp_path: Path) -> None:
    with launched(tmp_path, PIPELINE, stages=3) as process:
        assert are_ready(tmp_path, stages=3)
        time.sleep(1)
        pid = int((tmp_path / "1.pid").read_text())
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        code, _, error = process.end(15)
        assert time.monotonic() - began < 10
        assert code != 0
    assert error.startswith("error: stage 1 (")
    assert error.endswith(f", pid {pid}) was killed or ended; adapters in flight: a\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)]
)
def test_signals_that_end_a_run_are_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    """The second warning does not kill: a closed terminal is told twice."""
    with launched(tmp_path, ORDERLY) as process:
        assert are_ready(tmp_path), process.end(1)
        process.signal(number)
        if number in OTHERS:
            process.signal(number)
        assert process.end() == (128 + number, "", "")
    assert (tmp_path / "checkpoint").exists()


def test_killed_launcher_takes_all_with_it(tmp_path: Path) -> None:
    with launched(tmp_path, HANGS) as process:
        assert are_ready(tmp_path)
        os.kill(pids(tmp_path)[0], signal.SIGSTOP)
        process.signal(signal.SIGKILL)
        assert until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)), 5)


def test_ctrl_z_suspends_all_processes(tmp_path: Path) -> None:
    with launched(tmp_path, ORDERLY) as process:
        assert are_ready(tmp_path)
        every = [process.pid, *pids(tmp_path)]
        process.signal(signal.SIGTSTP)
        assert until(lambda: [state_of(pid) for pid in every] == ["T"] * 3)
        process.signal(signal.SIGCONT)
        assert until(lambda: "T" not in [state_of(pid) for pid in every])
        process.signal(signal.SIGINT)
        assert process.end() == (130, "", "")


@pytest.mark.nightly
def test_suspended_run_goes_on(tmp_path: Path) -> None:
    impatient = PIPELINE.replace('lambda: "a"', 'lambda: "a", patience=2')
    with launched(tmp_path, impatient) as process:
        assert are_ready(tmp_path)
        process.signal(signal.SIGTSTP)
        time.sleep(4)
        process.signal(signal.SIGCONT)
        time.sleep(1)
        assert process.code is None
        process.signal(signal.SIGINT)
        assert process.end() == (130, "", "")


@pytest.mark.nightly
def test_torchrun_starts_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        HEAD + PIPELINE.replace("caught or world", "not rank or world").replace("sleep(2)", "sleep(0)")
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path)],
        env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("sys.exit(3) if rank == 1 else 0", 3, r"stage 1 \(pid \d+\) ended with exit code 3; "),
        ("sys.exit(0) if rank == 0 else 0", 137, ""),
    ],
    ids=["fails", "leaves"],
)
def test_who_does_not_end_is_killed_and_told_of_once(tmp_path: Path, body: str, code: int, line: str) -> None:
    with launched(tmp_path, body + HANGS, stages=3, grace=1) as process:
        ended, _, error = process.end()
    assert ended == code
    assert re.fullmatch(f"error: {line}stages [012], 2 did not end; killed\n", error), error


def test_signal_while_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them listens to signals yet: no more are started, and all end."""
    started: list[subprocess.Popen[bytes]] = []
    plain = subprocess.Popen

    def start(_: object, **options: Any) -> subprocess.Popen[bytes]:
        started.append(plain([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    assert launch(3, ["-m", "nothing"]) == 128 + signal.SIGINT
    assert [process.returncode for process in started] == [-signal.SIGKILL]
