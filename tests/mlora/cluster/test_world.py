"""Processes of a pipeline find each other and agree, or are refused; strangers count for nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from mlora.cluster.heartbeats import Fault, Sign
from mlora.cluster.processes import Process, System, _fields
from mlora.cluster.world import SECRET, PeerError, World, _drawn_secret
from mlora.config.config_file import resolve_config
from mlora.run.run import train
from torch.distributed import HashStore, PrefixStore, TCPStore

from tests.mlora.stage_runs import COMMAND, ENVIRONMENT, assert_alike, commands, save_deep_base
from tests.mlora.stages import program, stages, until
from tests.mlora.tiny_run import run_data, write_run

AGREE = """
try:
    world.agree(facts, {timeout})
    print("agreed")
except (ValueError, PeerError) as error:
    print(type(error).__name__, error)
"""
FACTS = 'facts = {"torch": "2.13.0", "config": {"adapters": [{"r": 8}], "seed": 0}}\n'
LINKS = """
import torch
links = connect_neighbours(world)
def hand_on(source, target):
    token = torch.zeros(1, dtype=torch.uint8)
    if source:
        source.into.receive([token])
    if target:
        target.out.send([token + 1])
    return token.item()
print(hand_on(links.previous, links.next), hand_on(links.next, links.previous))
links.close()
"""


def told(body: str, *changes: str, ranks: list[int] | None = None, timeout: float = 30) -> list[str]:
    bodies = [FACTS + change + body.format(timeout=timeout) for change in changes]
    with stages(*bodies, ranks=ranks) as running:
        codes, outputs, errors = running.end()
        assert codes == [0] * len(codes), errors
        return outputs


def test_process_without_a_launcher_has_no_world() -> None:
    assert World.from_launcher() is None


def test_equal_facts_are_agreed_on() -> None:
    assert told(AGREE, "", "") == ["agreed\n"] * 2


def test_first_difference_is_told_by_the_stage_that_differs() -> None:
    first, second, third = told(AGREE, "", "facts['config']['adapters'][0]['r'] = 16\n", "facts['x'] = 1\n")
    me = Process.this().host
    assert second.startswith(f"ValueError stage 1 (host {me}, pid ")
    assert ") has config.adapters[0].r 16, stage 0 (host " in second
    assert second.endswith(") has 8; all stages need the same\n")
    assert first == third == second.replace("ValueError", "PeerError")


def test_fact_that_only_one_has_is_a_difference() -> None:
    _, second = told(AGREE, "", "facts['more'] = 'x'\n")
    assert "has more x, stage 0 (host " in second
    assert "has nothing;" in second


@pytest.mark.parametrize("rank", [0, 2])
def test_missing_stage_is_named_once(rank: int) -> None:
    """By the first of those that have come."""
    store = HashStore()
    World(2 - rank, 3, 2 - rank, store, Process.this()).publish(f"facts/{2 - rank}", "{}")
    with pytest.raises((ValueError, PeerError), match=r"^stage 1 has not come up within 0.05 s$") as caught:
        World(rank, 3, rank, store, Process.this()).agree({}, 0.05)
    assert caught.type is (PeerError if rank else ValueError)


@pytest.mark.nightly
def test_missing_process_is_named_once() -> None:
    first, second = told(AGREE, "", "", "", ranks=[0, 2], timeout=3)
    assert first == "ValueError stage 1 has not come up within 3 s\n"
    assert second == "PeerError stage 1 has not come up within 3 s\n"


def test_store_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(
        ValueError, match=r"^the launcher's store cannot be reached: [^\n]*127\.0\.0\.1"
    ) as caught:
        World.from_launcher(timeout=0.1)
    assert "\n" not in str(caught.value)


def test_links_pass_messages_both_ways() -> None:
    assert told(LINKS, "", "", "") == ["0 2\n", "1 1\n", "2 0\n"]


PATIENCE = 240.0  # seconds; a busy machine takes a minute to start three processes
LAUNCHER = """
import sys
from mlora.cluster.launch import launch
sys.exit(launch(2, {command}))
"""
HELD = """
import os, sys, time
from pathlib import Path
from mlora.run.loop import TrainingLoop
folder = Path({folder!r})
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
(folder / "port").write_text(os.environ["MASTER_PORT"])
plain = TrainingLoop._start
def start(self, group):
    if self._run.iteration == 3:
        (folder / "held").touch()
        while not (folder / "go").exists():
            time.sleep(0.02)
    return plain(self, group)
TrainingLoop._start = start
"""


def listening(pid: int) -> set[str]:
    """The local addresses, as the kernel writes them, at which a process takes connections."""
    files = list(Path(f"/proc/{pid}/fd").iterdir())
    sockets = {os.readlink(file) for file in files if file.exists() or file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    """A process of the same user that has nothing to do with the run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def forge(store: Any, other: Process) -> int:
    """Write, as somebody who knows the software but not the secret; returns how often."""
    early = {rank: store.get(f"beats/{rank}") for rank in (0, 1)}
    sign = Sign(other, number=10**9)
    fault = Fault(1, other.host, other.pid, "forged", own=False)
    signs = [sign, replace(sign, busy=1e9), replace(sign, fault=fault), replace(sign, goodbye=True)]
    texts = [json.dumps(asdict(one)) for one in signs]
    forged: list[tuple[str, Any]] = [(f"beats/{rank}", text) for rank in (0, 1) for text in texts]
    forged += [(f"beats/{rank}", b"\xff\x00") for rank in (0, 1)]
    forged += [(f"beats/{rank}", early[1 - rank][:64].decode() + texts[2]) for rank in (0, 1)]
    forged += [(f"beats/{rank}", early[1 - rank]) for rank in (0, 1)]
    forged += [(f"beats/{rank}", early[rank]) for rank in (0, 1)]
    forged += [("told", "0"), ("facts/0", "{}"), ("facts/1", "{}"), ("wires/1", "[]"), (SECRET, "mine")]
    for key, value in forged:
        store.set(key, value)
    for key in ("beats/0", "beats/1", "facts/0", "lengths/0"):
        store.delete_key(key)
    store.add("told", 1)
    return len(forged) + 5


@contextmanager
def held_run(folder: Path, *, launched: bool) -> Iterator[Callable[[], tuple[list[int | None], str]]]:
    """A run of two stages that waits for the file `go`; yields what waits for its end.

    Args:
        folder: of its files.
        launched: start the processes by the launcher, and not by the tests' fork server, which is faster.
    """
    held, arguments = HELD.format(folder=str(folder)), ["train", folder / "run.yaml"]
    if launched:
        script = folder / "script.py"
        script.write_text(COMMAND.format(before=held, arguments=[str(word) for word in arguments]))
        with program(LAUNCHER.format(command=[str(script)]), ENVIRONMENT) as launcher:
            (folder / "launcher").write_text(str(launcher.pid))
            yield lambda: ([(ended := launcher.end(PATIENCE))[0]] * 2, ended[2])
        return
    (folder / "launcher").write_text(str(os.getpid()))
    with commands(arguments, 2, dict.fromkeys((0, 1), held)) as running:
        yield lambda: ((ended := running.end(PATIENCE))[0], "".join(ended[2]))


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_strangers_change_nothing_and_reach_nothing_from_outside(
    tmp_path: Path, bystander: "subprocess.Popen[bytes]", launched: bool
) -> None:
    base = save_deep_base(tmp_path / "base")
    data = run_data(base, tmp_path)
    alone = train(resolve_config(data | {"output_dir": str(tmp_path / "alone")}, folder=tmp_path))
    write_run(tmp_path, data | {"pipeline": {"stages": 2}})
    other = Process("here", bystander.pid, Process.this().place, int(_fields(bystander.pid)[19]))
    with held_run(tmp_path, launched=launched) as end:
        assert until((tmp_path / "held").exists, PATIENCE), end()
        pids = [int((tmp_path / who).read_text()) for who in ("launcher", "0", "1")]
        assert set().union(*map(listening, pids)) == {"0100007F"}  # 127.0.0.1
        port = int((tmp_path / "port").read_text())
        store = PrefixStore("mlora", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
        assert forge(store, other) >= 20
        for rank in (0, 1):  # each has given two more signs, and read the other's before the second
            for _ in range(2):
                before = store.get(f"beats/{rank}")
                assert until(lambda key=f"beats/{rank}", old=before: store.get(key) != old)  # type: ignore[misc]
        (tmp_path / "go").touch()
        codes, error = end()
    assert codes == [0, 0], error
    assert "error" not in error
    assert bystander.poll() is None
    assert_alike(tmp_path / "run", alone.output_dir)


def test_only_the_secret_of_the_run_makes_a_value() -> None:
    store = HashStore()
    mine, other = (World(rank, 2, rank, store, Process.this(), b"one") for rank in (0, 1))
    mine.publish("a", "right")
    held = store.get("a")
    assert other.values(["a", "b"]) == ["right", None]
    assert World(1, 2, 1, store, Process.this(), b"two").values(["a"]) == [None]
    store.set("b", held)  # a value of one key is none of another
    for forged in (b"", b"right", b"\xff" * 70, held[:-1], held[:-5] + b"wrong"):
        store.set("a", forged)
        assert other.values(["a", "b"]) == [None, None]
    store.delete_key("a")
    mine.publish_again(store)
    assert other.values(["a"]) == ["right"]


def test_rank_0_draws_a_secret_where_no_launcher_gives_one() -> None:
    store = HashStore()
    drawn = _drawn_secret(store, 0)
    assert len(drawn) == 64
    assert _drawn_secret(store, 1) == drawn
    World(0, 1, 0, store, Process.this(), drawn.encode()).agree({})
    assert not store.check([SECRET])


def test_a_process_of_another_launcher_is_not_ended(bystander: "subprocess.Popen[bytes]") -> None:
    """It is a child of this process, and not of the one that started this process."""
    other = Process("here", bystander.pid, Process.this().place, int(_fields(bystander.pid)[19]))
    System().kill(other)
    assert bystander.poll() is None
    other.kill(os.getpid())
    assert bystander.wait(20) == -signal.SIGKILL
