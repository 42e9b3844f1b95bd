"""What a launcher does with its processes and when, in simulated time.

`test_launch.py` has it start real ones.
"""

from __future__ import annotations

import itertools
import math
import signal
from typing import Any

import pytest
from mlora.cluster.launch import _attend
from mlora.cluster.processes import System

NEVER = math.inf


class Clock(System):
    """Goes on where somebody sleeps; `signals` reach the launcher at a time."""

    def __init__(self, signals: list[float]) -> None:
        self.time = 0.0
        self.signals = signals
        self.caught: list[int] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        while self.signals and self.signals[0] <= self.time:
            self.signals.pop(0)
            self.caught.append(signal.SIGINT)


class Child:
    """A process.

    Args:
        at: when it ends by itself.
        code: that it ends with then.
        ends: for a signal, the seconds after which it ends and its exit code; others are ignored.
    """

    numbers = itertools.count(101)

    def __init__(
        self, at: float = NEVER, code: int = 0, ends: dict[signal.Signals, tuple[float, int]] | None = None
    ) -> None:
        self.pid = next(self.numbers)
        self.at, self.code, self.ends = at, code, ends or {}
        self.met: list[tuple[signal.Signals, float]] = []
        self.returncode: int | None = None
        self.clock: Clock

    def poll(self) -> int | None:
        if self.returncode is None and self.clock.time >= self.at:
            self.returncode = self.code
        return self.returncode

    def wait(self) -> int | None:
        assert self.poll() is not None, "waits for ever"
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        self.met.append((number, self.clock.time))
        if number == signal.SIGKILL:
            self.at, self.code = self.clock.time, -signal.SIGKILL
        elif number in self.ends:
            after, code = self.ends[number]
            self.at, self.code = min(self.at, self.clock.time + after), code

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def signals(self) -> list[signal.Signals]:
        return [number for number, _ in self.met]


def attend(children: list[Child], *signals: float) -> tuple[int, float]:
    """The launcher's exit code, and when it ends."""
    clock = Clock(list(signals))
    for child in children:
        child.clock = clock
    processes: Any = children
    return _attend(processes, clock.caught, clock), clock.time


Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([(1, 0), (2, 0), (3, 0)], 0),
        ([(1, 0), (2, 3), (3, 1)], 3),
        ([(3, 1), (2, 130), (1, 0)], 130),
        ([(2, 1), (1, -signal.SIGKILL), (2, 1)], 137),
        ([(2, 1), (2, 4), (2, 5)], 1),
    ],
)
def test_exit_code_is_that_of_the_first_that_fails(
    ends: list[tuple[float, int]], code: int, capsys: Output
) -> None:
    children = [Child(at, own) for at, own in ends]
    assert attend(children)[0] == code
    assert [child.met for child in children] == [[], [], []]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("takes", [1.0, 3600.0])
def test_first_signal_ends_the_run_in_order(takes: float, capsys: Output) -> None:
    """Only stage 0 is told, and takes its time; the others end when it does."""
    children = [Child(ends={signal.SIGINT: (takes, 130)}), Child(at=10 + takes), Child(at=10 + takes)]
    code, seconds = attend(children, 10.0)
    assert code == 130
    assert seconds == pytest.approx(10 + takes, abs=0.5)
    assert [child.signals() for child in children] == [[signal.SIGINT], [], []]
    assert capsys.readouterr().err == ""


def test_second_signal_kills_in_the_end(capsys: Output) -> None:
    children = [Child(), Child(), Child(at=1.0)]
    code, seconds = attend(children, 10.0, 30.0)
    assert code == 137
    assert seconds == pytest.approx(35, abs=0.5)
    assert children[0].signals() == [signal.SIGINT, signal.SIGINT, signal.SIGKILL]
    assert (children[1].signals(), children[2].signals()) == ([signal.SIGKILL], [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("after", "signals"), [(2.0, []), (NEVER, [signal.SIGTERM])])
def test_others_that_do_not_see_a_death_are_sent_sigterm(
    after: float, signals: list[signal.Signals], capsys: Output
) -> None:
    """Those that have met see it by themselves, and tell of it; else the launcher does."""
    killed = Child(at=10.0, code=-signal.SIGKILL)
    others = [Child(at=10 + after, code=1, ends={signal.SIGTERM: (1, 143)}) for _ in range(2)]
    code, seconds = attend([others[0], killed, others[1]])
    assert code == 137
    assert 10 + min(after, 3) < seconds < 15
    assert [child.signals() for child in others] == [signals] * 2
    line = f"error: stage 1 (pid {killed.pid}) was ended by SIGKILL\n"
    assert capsys.readouterr().err == (line if signals else "")


def test_stage_that_ends_with_an_error_has_told_of_it(capsys: Output) -> None:
    children = [Child(ends={signal.SIGTERM: (1, 143)}), Child(at=10.0, code=1)]
    assert attend(children)[0] == 1
    assert children[0].signals() == [signal.SIGTERM]
    assert capsys.readouterr().err == ""


def test_after_a_signal_others_are_sent_sigterm_at_once(capsys: Output) -> None:
    children = [Child(ends={signal.SIGINT: (0, 130)}), Child(ends={signal.SIGTERM: (0, 143)})]
    code, seconds = attend(children, 10.0)
    assert code == 130
    assert seconds < 11
    assert children[1].signals() == [signal.SIGTERM]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("ends", "code", "line"),
    [
        (
            [NEVER, 10.0, NEVER],
            3,
            "stage 1 (pid {pid}) ended with exit code 3; stages 0, 2 did not end; killed",
        ),
        (
            [10.0, NEVER, NEVER],
            3,
            "stage 0 (pid {pid}) ended with exit code 3; stages 1, 2 did not end; killed",
        ),
        ([10.0, NEVER, 20.0], 137, "stages 1 did not end; killed"),
    ],
)
def test_who_does_not_end_is_killed_and_told_of_once(
    ends: list[float], code: int, line: str, capsys: Output
) -> None:
    own = code if "exit code" in line else 0
    children = [Child(at, own if at == 10 else 0) for at in ends]
    found, seconds = attend(children)
    assert found == code
    assert seconds == pytest.approx(30, abs=0.5)
    assert [signal.SIGKILL in child.signals() for child in children] == [at == NEVER for at in ends]
    pid = children[ends.index(10.0)].pid
    assert capsys.readouterr().err == f"error: {line.format(pid=pid)}\n"


def test_stage_0_may_end_before_the_others(capsys: Output) -> None:
    children = [Child(at=10.0), Child(at=25.0)]
    assert attend(children)[0] == 0
    assert children[1].met == []
    assert capsys.readouterr().err == ""
