"""What the watch decides, in simulated time: who is at fault, when, and who tells of it.

`test_watchdog_processes.py` has real processes meet such faults.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from mlora.cluster.heartbeats import Fault
from mlora.cluster.world import PeerError

from tests.mlora.simulated_stages import KILLED, Simulation, Stage, simulated

SIZE = 3
AT = 5.0  # seconds after which a stage meets its fault
APART = ["one", "two", "three"]
FLIGHT = "; adapters in flight: a{0}, b{0}"
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 10))]

Body = Callable[[Stage], object]


def waits(stage: Stage) -> None:
    stage.watch()
    stage.sleep()


def blocked(stage: Stage) -> None:
    """Waits for a message of a neighbour; where the connection breaks, the watch may know why."""
    neighbours = [rank for rank in (stage.rank - 1, stage.rank + 1) if 0 <= rank < SIZE]
    with stage.watch():
        stage.receive(*neighbours)


def raises(stage: Stage) -> None:
    with stage.watch():
        stage.sleep(AT)
        raise KeyError("boom")


def exits(stage: Stage) -> None:
    stage.watch()
    stage.sleep(AT)


def says_so_itself(stage: Stage) -> None:
    watch = stage.watch()
    stage.sleep(AT)
    assert watch.report("disk full", told=True)
    raise SystemExit(3)


class Kind(NamedTuple):
    """A fault.

    Attributes:
        body: what the stage at fault does.
        code: that it ends with.
        line: what is told of it.
        noticed: seconds after the fault before which nobody ends, and after which nobody is left.
    """

    body: Body
    code: int
    line: str
    noticed: tuple[float, float]


KINDS = {
    "SIGKILL": Kind(waits, KILLED, " was killed or ended" + FLIGHT, (0, 3.5)),
    "SIGSTOP": Kind(waits, KILLED, r" has not answered for [67] s" + FLIGHT, (5, 10)),
    "raises": Kind(raises, 1, ": KeyError: 'boom'" + FLIGHT, (2, 5)),
    "exits": Kind(exits, 0, " was killed or ended" + FLIGHT, (0, 3.5)),
    "told": Kind(says_so_itself, 3, "", (0, 3)),
}


@contextmanager
def struck(stage: int, fault: str, others: Body = blocked, **options: Any) -> Iterator[Simulation]:
    """Three stages, of which one has met its fault."""
    bodies = [KINDS[fault].body if rank == stage else others for rank in range(SIZE)]
    with simulated(*bodies, **options) as simulation:
        if fault == "SIGKILL":
            simulation.at(AT, simulation.stages[stage].die)
        if fault == "SIGSTOP":
            simulation.at(AT, simulation.stages[stage].stop)
        simulation.run()
        yield simulation


def who(stage: int, machine: str = "one") -> str:
    return rf"error: stage {stage} \({machine}, pid {1000 + stage}\)"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("others", [blocked, waits])
@pytest.mark.parametrize("store_in", [None, 0])
@pytest.mark.parametrize("fault", KINDS)
@pytest.mark.parametrize("stage", range(SIZE))
def test_fault_ends_all_and_is_told_once(
    stage: int, fault: str, store_in: int | None, others: Body, seed: int
) -> None:
    kind = KINDS[fault]
    with struck(stage, fault, others, store_in=store_in, seed=seed) as simulation:
        assert simulation.codes == [kind.code if rank == stage else 1 for rank in range(SIZE)]
        ended = [peer.ended_at - AT for peer in simulation.stages if peer.rank != stage]
        assert kind.noticed[0] <= min(ended) < max(ended) <= kind.noticed[1]
        expected = who(stage) + kind.line.format(stage) + "\n" if kind.line else ""
        assert re.fullmatch(expected, "".join(simulation.lines)), simulation.lines


@pytest.mark.parametrize("stuck", range(SIZE))
def test_lowest_that_lives_tells(stuck: int) -> None:
    with struck(stuck, "SIGSTOP") as simulation:
        teller = 1 if stuck == 0 else 0
        assert [len(stage.lines) for stage in simulation.stages] == [int(r == teller) for r in range(SIZE)]


@pytest.mark.parametrize("stage", range(SIZE))
def test_stage_at_fault_tells_of_its_own_error(stage: int) -> None:
    """In the seconds of the election, no lower one claims to."""
    alone = [raises if rank == stage else waits for rank in range(SIZE)]
    with simulated(*alone) as simulation:
        simulation.run()
        assert sum(map(len, (peer.lines for peer in simulation.stages))) == 1


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("stage", range(SIZE))
def test_stages_on_machines_of_their_own(stage: int, fault: str) -> None:
    """Nobody sees the process: its silence is the fault, and nobody can kill it."""
    with struck(stage, fault, waits, machines=APART) as simulation:
        expected = [1] * SIZE
        assert [code for rank, code in enumerate(simulation.codes) if rank != stage] == expected[1:]
        assert simulation.codes[stage] == (KILLED if fault == "SIGKILL" else None)
        (line,) = simulation.lines
        silent = who(stage, APART[stage]) + r" has not answered for [67] s" + FLIGHT.format(stage) + "\n"
        assert re.fullmatch(silent, line), line


@pytest.mark.parametrize(
    ("fault", "reason"), [("SIGKILL", "was killed or ended"), ("SIGSTOP", "has not answered for [67] s")]
)
def test_store_of_stage_0_is_lost_on_another_machine(fault: str, reason: str) -> None:
    """The others have no store to agree who tells, and each machine has its own line."""
    with struck(0, fault, machines=APART, store_in=0) as simulation:
        assert simulation.codes[1:] == [1, 1]
        assert [len(stage.lines) for stage in simulation.stages] == [0, 1, 1]
        line = who(0) + " cannot be reached: it or its launcher " + reason + FLIGHT.format(0)
        assert all(re.fullmatch(line + "\n", found) for found in simulation.lines), simulation.lines


@pytest.mark.parametrize(
    ("state", "reason", "noticed"),
    [("gone", "was killed or ended", 3.5), ("stopped", "has not answered for [67] s", 9)],
)
@pytest.mark.parametrize("others", [blocked, waits])
def test_store_of_the_launcher_is_lost(state: str, reason: str, noticed: float, others: Body) -> None:
    with simulated(others, others, others) as simulation:
        simulation.at(AT, lambda: setattr(simulation, "launcher", state))
        simulation.run()
        assert simulation.codes[1:] == [1, 1]
        assert max(stage.ended_at for stage in simulation.stages) < AT + noticed
        line = who(0) + " cannot be reached: its launcher " + reason + FLIGHT.format(0)
        assert any(re.fullmatch(line + "\n", found) for found in simulation.lines), simulation.lines


def test_store_that_is_slow_for_a_while_is_no_fault() -> None:
    with simulated(waits, waits) as simulation:
        simulation.at(AT, lambda: setattr(simulation, "launcher", "stopped"))
        simulation.at(AT + 4.5, lambda: setattr(simulation, "launcher", "runs"))
        simulation.run(60)
        assert (simulation.codes, simulation.lines) == ([None, None], [])


@pytest.mark.parametrize(("seconds", "fault"), [(4.5, False), (7.5, True)])
@pytest.mark.parametrize("store_in", [None, 0])
def test_call_that_keeps_pythons_lock(seconds: float, fault: bool, store_in: int | None) -> None:
    with simulated(waits, waits, store_in=store_in) as simulation:
        holds = simulation.stages[1]
        simulation.at(AT, lambda: setattr(holds, "held", True))
        simulation.at(AT + seconds, lambda: setattr(holds, "held", False))
        simulation.run(60)
        assert simulation.codes == ([1, KILLED] if fault else [None, None])
        assert len(simulation.lines) == int(fault)


@pytest.mark.parametrize("store_in", [None, 0])
def test_suspended_run_goes_on(store_in: int | None) -> None:
    """As with Ctrl-Z, for longer than any patience: none has given or read a sign of life, or worked."""

    def body(stage: Stage) -> None:
        stage.watch(work=lambda: int(stage.now() < AT + 3620), limit=30)
        stage.sleep()

    with simulated(body, body, body, store_in=store_in) as simulation:
        for stage in simulation.stages:
            simulation.at(AT, stage.stop)
            simulation.at(AT + 3610 + stage.rank / 5, stage.go_on)
        simulation.run(AT + 3700)
        assert (simulation.codes, simulation.lines) == ([None] * SIZE, [])


def working(piece: Callable[[Stage], int]) -> Body:
    def body(stage: Stage) -> None:
        stage.watch(work=lambda: piece(stage), limit=30)
        stage.sleep()

    return body


@pytest.mark.parametrize(
    "piece", [lambda stage: 0, lambda stage: int(stage.now() / 20)], ids=["none", "next"]
)
def test_work_that_goes_on_is_no_fault(piece: Callable[[Stage], int]) -> None:
    with simulated(working(piece), working(piece)) as simulation:
        simulation.run(200)
        assert (simulation.codes, simulation.lines) == ([None, None], [])


def test_stage_that_hangs_while_it_gives_signs_of_life() -> None:
    with simulated(working(lambda stage: 0), working(lambda stage: 7)) as simulation:
        simulation.run()
        assert simulation.codes[0] == 1
        assert simulation.codes[1] in (1, KILLED)
        (line,) = simulation.lines
        hangs = r" hangs: at one micro-batch for 3[01] s" + FLIGHT.format(1) + "\n"
        assert re.fullmatch(who(1) + hangs, line), line


def says_goodbye(after: float, **options: Any) -> Body:
    def body(stage: Stage) -> None:
        with stage.watch(**options):
            stage.sleep(after)

    return body


@pytest.mark.parametrize("store_in", [None, 0])
def test_goodbyes_are_no_faults(store_in: int | None) -> None:
    with simulated(says_goodbye(1), says_goodbye(20), says_goodbye(3.3), store_in=store_in) as simulation:
        simulation.run()
        assert (simulation.codes, simulation.lines) == ([0, 0, 0], [])
        ended = [stage.ended_at for stage in simulation.stages]
        assert ended[2] < 4, "only stage 0 waits for the others"
        assert 20 < ended[0] < 20.5


def test_stage_0_does_not_wait_for_ever() -> None:
    with simulated(says_goodbye(1), waits) as simulation:
        simulation.run(60)
        assert simulation.codes == [0, None]
        assert 31 <= simulation.stages[0].ended_at < 31.5


def test_end_without_a_goodbye_is_a_fault() -> None:
    def closes(stage: Stage) -> None:
        watch = stage.watch()
        stage.sleep(AT)
        watch.close()

    with simulated(waits, closes) as simulation:
        simulation.run()
        assert simulation.codes == [1, 0]
        (line,) = simulation.lines
        assert line.startswith("error: stage 1 (")
        assert " was killed or ended" in line


@pytest.mark.parametrize(
    ("error", "waits_for"), [(KeyError("lost"), 2), (PeerError("gone"), 8), (dist.DistError("gone"), 8)]
)
def test_own_error_is_told_after_one_of_a_peer(error: Exception, waits_for: float) -> None:
    def stumbles(stage: Stage) -> None:
        with stage.watch():
            stage.sleep(AT)
            raise error

    for peer_fails in (False, True):
        with simulated(waits, stumbles, waits) as simulation:
            if peer_fails:
                simulation.at(AT + waits_for - 1.5, simulation.stages[2].die)
            simulation.run()
            (line,) = simulation.lines
            expected = " was killed or ended" if peer_fails else f": {type(error).__name__}: {error}"
            assert re.fullmatch(who(2 if peer_fails else 1) + expected + "; .*\n", line), line
            if not peer_fails:
                assert simulation.stages[1].ended_at >= AT + waits_for


def test_error_that_two_have_is_told_once() -> None:
    """The second one learns that the user has been told."""
    mine = {}

    def fails(stage: Stage) -> None:
        watch = stage.watch()
        stage.sleep(AT + stage.rank / 100)
        mine[stage.rank] = watch.report("disk full", told=True)
        raise SystemExit(1)

    with simulated(fails, fails) as simulation:
        simulation.run()
        assert (simulation.codes, simulation.lines) == ([1, 1], [])
        assert sorted(mine.items()) in ([(0, True)], [(0, True), (1, False)])


def test_system_exit_and_empty_messages() -> None:
    for error, told in ((SystemExit(5), "was told to end"), (KeyError(), "KeyError")):

        def ends(stage: Stage, error: BaseException = error) -> None:
            with stage.watch():
                stage.sleep(AT)
                raise error

        with simulated(waits, ends) as simulation:
            simulation.run()
            assert simulation.lines == [
                f"error: stage 1 (one, pid 1001): {told}; adapters in flight: a1, b1\n"
            ]
            assert simulation.codes == [1, 5 if isinstance(error, SystemExit) else 1]


@pytest.mark.parametrize("way", ["returns", "raises", "blocks"])
def test_who_is_told_of_a_fault_can_put_things_right_first(way: str) -> None:
    met: list[tuple[int, Fault]] = []

    def puts_right(stage: Stage) -> None:
        def on_fault(fault: Fault) -> None:
            assert not stage.lines
            met.append((stage.rank, fault))
            if way == "raises":
                raise OSError("no terminal")
            if way == "blocks":
                stage.sleep()

        stage.watch(on_fault=on_fault)
        stage.sleep()

    with simulated(puts_right, puts_right) as simulation:
        simulation.at(AT, simulation.stages[1].die)
        simulation.run()
        assert [(rank, fault.stage) for rank, fault in met] == [(0, 1)]
        assert simulation.codes == [1, KILLED]
        assert simulation.stages[0].ended_at < AT + 4
        assert len(simulation.lines) == int(way != "blocks")
        assert [bool(stage.tracebacks) for stage in simulation.stages] == [way == "raises", False]
        simulation.stages[0].tracebacks.clear()


def test_own_fault_is_not_met() -> None:
    def fails(stage: Stage) -> None:
        with stage.watch(on_fault=lambda fault: pytest.fail("met its own fault")):
            stage.sleep(AT)
            raise KeyError("boom")

    with simulated(waits, fails) as simulation:
        simulation.run()
        assert simulation.codes == [1, 1]


def test_signal_while_a_fault_is_told() -> None:
    """The other one reads late, so that stage 0 waits for it when the signal comes."""

    def reports(stage: Stage) -> None:
        with stage.watch() as watch:
            stage.sleep(1.5)  # the other has read the first sign, and reads the next 5 s later
            watch.report("is broken", told=True)

    def reads_late(stage: Stage) -> None:
        stage.watch(interval=5.0)
        stage.sleep()

    with simulated(reports, reads_late) as simulation:
        simulation.at(2.0, lambda: simulation.stages[0].interrupt(SystemExit(143)))
        simulation.run()
        assert (simulation.codes, simulation.lines) == ([143, 1], [])


def test_error_of_the_watch_itself() -> None:
    def broken(stage: Stage) -> None:
        def work() -> int:
            if stage.now() > AT:
                raise KeyError("work")
            return 0

        stage.watch(work=work)
        stage.sleep()

    with simulated(broken, waits) as simulation:
        simulation.run()
        assert simulation.codes == [1, 1]
        gives = "gives no sign of life any more, after the error above; adapters in flight: a0, b0"
        assert simulation.stages[0].lines == [f"error: stage 0 (one, pid 1000) {gives}\n"]
        simulation.stages[0].tracebacks.clear()


def test_adapters_of_a_stage_that_has_none_are_those_of_another_one() -> None:
    def idle(stage: Stage) -> None:
        stage.watch(describe=lambda: "")
        stage.sleep()

    with simulated(idle, waits, idle) as simulation:
        simulation.at(AT, simulation.stages[2].die)
        simulation.run()
        assert simulation.lines == [
            "error: stage 2 (one, pid 1002) was killed or ended; adapters in flight: a1, b1\n"
        ]
