"""Real processes, of which one dies, hangs or fails: it is named once, and every process ends.

`test_watchdog.py` has every case in simulated time.
"""

import re
import signal
import time

import pytest

from tests.mlora.stages import Stages, stages

NOTICED = 10.0  # seconds

BLOCKED = """
import torch
with watch() as w:
    links = connect_neighbours(world)
    ready(w)
    neighbour = links.previous or links.next
    neighbour.into.receive([torch.zeros(1, dtype=torch.uint8)])
"""
WAITING = """
w = watch()
links = connect_neighbours(world)
ready(w)
time.sleep(60)
"""
RAISES = """
with watch() as w:
    links = connect_neighbours(world)
    ready(w)
    raise KeyError("boom")
"""
EXITS = """
w = watch()
links = connect_neighbours(world)
ready(w)
os._exit(0)
"""
BODIES = {"SIGKILL": WAITING, "SIGSTOP": WAITING, "raises": RAISES, "exits": EXITS}
LINES = {
    "SIGKILL": "was killed or ended; adapters in flight: a{0}, b{0}",
    "SIGSTOP": r"has not answered for [67] s; adapters in flight: a{0}, b{0}",
    "raises": "KeyError: 'boom'; adapters in flight: a{0}, b{0}",
    "exits": "was killed or ended; adapters in flight: a{0}, b{0}",
}


def lines(errors: list[str]) -> list[str]:
    return [line for text in errors for line in text.splitlines() if line.startswith("error: ")]


def end_noticed(running: Stages) -> tuple[list[int | None], list[str]]:
    began = time.monotonic()
    codes, _, errors = running.end(timeout=20)
    assert time.monotonic() - began < NOTICED
    return codes, errors


QUICK = [(1, "SIGKILL", True), (0, "SIGKILL", False), (0, "exits", True)]
CASES = [(stage, fault, True) for stage in (0, 1) for fault in ("SIGKILL", "raises", "exits")]
CASES += [(0, fault, False) for fault in BODIES]  # SIGSTOP of others: among three stages, below


@pytest.mark.parametrize(
    ("stage", "fault", "holds_store"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.nightly) for case in CASES],
)
def test_fault_ends_a_peer_that_is_blocked(stage: int, fault: str, holds_store: bool) -> None:
    bodies = [BLOCKED, BLOCKED]
    bodies[stage] = BODIES[fault]
    with stages(*bodies, holds_store=holds_store) as running:
        running.until_ready()
        if fault.startswith("SIG"):
            running.signal(stage, signal.Signals[fault])
        codes, errors = end_noticed(running)
    assert codes[1 - stage] == 1
    assert codes[stage] == (0 if fault == "exits" else 1 if fault == "raises" else -signal.SIGKILL)
    (line,) = lines(errors)
    pid = running.processes[stage].pid
    colon = ":" if fault == "raises" else ""
    pattern = rf"error: stage {stage} \(\S+, pid {pid}\){colon} " + LINES[fault].format(stage)
    assert re.fullmatch(pattern, line), line


def test_a_stage_that_takes_the_store_with_it_at_once() -> None:
    """The other may not have read a sign of it yet, and names the adapters on its own stage then."""
    exits = EXITS.replace("ready(w)", "ready()")
    assert exits != EXITS
    with stages(exits, BLOCKED, holds_store=False) as running:
        running.until_ready()
        codes, errors = end_noticed(running)
    assert codes == [0, 1]
    (line,) = lines(errors)
    in_flight = "; adapters in flight: (a0, b0|a1, b1)"
    assert re.fullmatch(rf"error: stage 0\b.* was killed or ended({in_flight})?", line), line


@pytest.mark.nightly
@pytest.mark.parametrize("stuck", [0, 1])
def test_stuck_stage_of_three_is_told_by_the_lowest_that_lives(stuck: int) -> None:
    bodies = [WAITING if stage == stuck else BLOCKED for stage in range(3)]
    with stages(*bodies) as running:
        running.until_ready()
        running.signal(stuck, signal.SIGSTOP)
        codes, errors = end_noticed(running)
    teller = 1 if stuck == 0 else 0
    assert codes == [-signal.SIGKILL if stage == stuck else 1 for stage in range(3)]
    assert [len(lines([text])) for text in errors] == [int(stage == teller) for stage in range(3)]
    assert f"error: stage {stuck} " in errors[teller]


def test_error_that_the_user_was_told_of_is_not_told_again() -> None:
    telling = """
w = watch()
ready()
w.report("disk full", told=True)
print("error: disk full", file=sys.stderr)
sys.exit(3)
"""
    with stages("w = watch(); ready(); time.sleep(60)", telling) as running:
        codes, errors = end_noticed(running)
    assert codes == [1, 3]
    assert lines(errors) == ["error: disk full"]


def test_who_is_told_of_a_fault_can_put_things_right_first() -> None:
    body = """
w = watch(on_fault=lambda fault: print("told of", fault.stage))
ready(w)
time.sleep(60)
"""
    with stages(body, body) as running:
        running.until_ready()
        running.signal(0, signal.SIGKILL)
        codes, outputs, errors = running.end()
    assert codes == [-signal.SIGKILL, 1]
    assert outputs[1] == "ready\ntold of 0\n"
    assert len(lines(errors)) == 1


@pytest.mark.nightly
def test_goodbyes_and_long_calls_are_no_faults() -> None:
    hold = "import ctypes; ctypes.PyDLL(None).sleep({0})  # keeps Python's lock\n"
    first = "w = watch(); ready(); w.goodbye()"
    second = "w = watch(); ready(); " + hold.format(4) + "w.goodbye()"
    third = "w = watch(work=lambda: int(time.monotonic()), limit=3); ready(); time.sleep(5); w.goodbye()"
    with stages(first, second, third, holds_store=False) as running:
        codes, _, errors = running.end()
    assert codes == [0, 0, 0], errors
    assert not lines(errors)


@pytest.mark.nightly
def test_a_signal_may_come_while_a_fault_is_told() -> None:
    """The other one reads late, so that stage 0 waits for it when the signal comes."""
    told = """
import threading
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
with watch() as w:
    ready()
    time.sleep(1.5)  # the other has read the first sign, and reads the next 5 s later
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    w.report("is broken", told=True)
"""
    with stages(told, "w = watch(interval=5.0); ready(); time.sleep(60)") as running:
        running.until_ready()
        codes, errors = end_noticed(running)
    assert codes == [143, 1]
    assert not lines(errors)


@pytest.mark.nightly
def test_a_stage_that_hangs_while_it_gives_signs_of_life() -> None:
    waits, hangs = (f"w = watch(work=lambda: {n}, limit=3); ready(); time.sleep(60)" for n in (0, 7))
    with stages(waits, hangs) as running:
        running.until_ready()
        codes, errors = end_noticed(running)
    assert codes[0] == 1
    assert codes[1] in (1, -signal.SIGKILL)
    (line,) = lines(errors)
    assert re.search(
        r"stage 1 \(.*\) hangs: at one micro-batch for [345] s; adapters in flight: a1, b1", line
    )
