"""Strangers: no port of a run is open beyond this machine, and what they write counts for nothing."""

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
from mlora.cluster.world import SECRET, World, _drawn_secret
from mlora.config.config_file import resolve_config
from mlora.run.run import train
from torch.distributed import HashStore, PrefixStore, TCPStore

from tests.mlora.stage_runs import COMMAND, ENVIRONMENT, assert_alike, commands, save_deep_base
from tests.mlora.stages import program, until
from tests.mlora.tiny_run import run_data, write_run

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
