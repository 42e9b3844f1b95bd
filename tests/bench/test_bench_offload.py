"""The benchmark of offloading: its contenders train alike, and its arithmetic is right; no time is judged."""

import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LIMIT = 64 << 20


@pytest.fixture
def module(bench_folder: Path) -> Any:
    return lambda name: import_module(f"offload.{name}")


@pytest.mark.nightly
def test_parts_run(bench_folder: Path, tmp_path: Path) -> None:
    """The folder of temporary files must be on a disk."""
    parts, out = ["adamw", "stream", "adapters"], tmp_path / "out"
    command = [sys.executable, bench_folder / "bench_offload.py", *parts, "--quick", "--folder", tmp_path]
    done = subprocess.run([*command, "--out", out], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    written = {f"{part}.{kind}" for part in parts for kind in ("json", "txt")}
    assert {path.name for path in out.iterdir()} == {*written, "adapters.png"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_all_contenders_train_alike(module: Any, tmp_path: Path) -> None:
    """Also: reading a step reads the blocks that training a step reads."""
    from shared.shapes import ModelShape

    base, contenders = module("base"), module("contenders")
    shape = ModelShape(32, 48, heads=4, kv_heads=2, layers=5, vocabulary=61)
    size = base.write_base(tmp_path, shape)
    assert size == 2 * 5 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert len(list(tmp_path.glob("block-*.safetensors"))) == 5
    engines = {
        "resident": contenders.resident(tmp_path),
        "serial": contenders.serial(tmp_path, 3),
        "overlapped": contenders.overlapped(tmp_path, 3),
        "mmap": contenders.mapped(tmp_path, ahead=False),
        "mmap ahead": contenders.mapped(tmp_path, ahead=True),
    }
    for engine in engines.values():
        contenders.add_adapters(engine, 2, 4)
    batch = contenders.random_batch({"a0": 6, "a1": 9}, shape.vocabulary)
    for _ in range(2):
        losses = {name: contenders.train(engine, batch) for name, engine in engines.items()}
        module("streaming").check_equal(losses)
    for name in ("serial", "overlapped"):
        stream = contenders.stream_of(engines[name])
        loads, read = contenders.reads_of_a_step(stream)
        before = stream.loads
        contenders.train(engines[name], batch)
        assert stream.loads - before == loads == 2 * (5 - 3)
        assert read >= loads * size / 5
    losses["mmap"]["a0"] += 1e-9 * losses["mmap"]["a0"]
    with pytest.raises(RuntimeError, match="losses of mmap and resident differ"):
        module("streaming").check_equal(losses)


def test_a_folder_in_memory_is_refused(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = module("base")
    assert base.file_system(Path("/proc")) == "proc"
    assert base.file_system(tmp_path) == base.file_system(tmp_path / "missing")
    monkeypatch.setattr(base, "file_system", lambda folder: "tmpfs")
    with pytest.raises(OSError, match="is on tmpfs, which is in memory; give --folder on a disk"):
        base.check_disk(tmp_path)


def took(**seconds: float) -> dict[str, dict[str, float]]:
    return {name.replace("_", " "): {"seconds": value} for name, value in seconds.items()}


def test_turns_go_back_and_forth(module: Any) -> None:
    turns = module("turns")
    calls: list[str] = []
    cases = {name: lambda name=name: calls.append(name) for name in "abc"}
    found = turns.take_turns(cases, 2, warm_up=1)
    assert "".join(calls) == "abccbaabc"
    assert [list(turn) for turn in found] == [["a", "b", "c"]] * 2
    pair = [took(a=1.0, b=4.0), took(a=3.0, b=6.0)]
    assert turns.ratios(pair, "b", "a") == [4.0, 2.0]


def test_efficiency_is_the_share_that_was_hidden(module: Any) -> None:
    streaming = module("streaming")
    turn = {
        "resident": {"seconds": 2.0},
        "serial, 3 slots": {"seconds": 3.0},
        "overlapped, 3 slots": {"seconds": 2.2},
        "I/O alone, 3 slots": {"seconds": 1.0},
    }
    assert streaming._efficiency(turn, 3) == pytest.approx(0.8)


def test_tokens_that_hide_the_streaming(module: Any) -> None:
    """1024 tokens take 4 s, and reading the base twice takes 2 s, of which a step reads three quarters."""
    packed = module("packed")
    turn = {"resident 16": {"seconds": 4.0}, "I/O alone": {"seconds": 1.5}}
    assert packed.hiding_tokens(turn, passes=1.5) == pytest.approx(512)
    for rows, lengths in ((1, [1]), (64, [64]), (65, [33, 32]), (1700, [107] * 4 + [106] * 12)):
        assert packed.split(rows) == lengths


def test_what_is_met_and_missed(module: Any) -> None:
    report = module("report")
    must = [report.at_least("a", 0.9, 0.9), report.at_most("b", 2.0, 1.0), report.at_least("c", None, 1.0)]
    data = {"quick": False, "must": must}
    assert report.missed(data) == ["b", "c"]
    assert "MISSED  b: 2 (must be at most 1)" in report.verdicts(data)
    assert "MISSED  c: nothing (must be at least 1)" in report.verdicts(data)
    assert report.missed(data | {"quick": True}) == report.verdicts(data | {"quick": True}) == []


def test_a_command_in_a_memory_group(module: Any) -> None:
    groups: ModuleType = module("memory_group")
    try:
        with groups.MemoryGroup(LIMIT) as group:
            assert group.start([sys.executable, "-c", "bytearray(30 << 20)"]).wait() == 0
            usage = group.usage()
            assert (usage.limit, usage.failed, usage.killed) == (LIMIT, 0, 0)
            assert 30 << 20 <= usage.peak < LIMIT
            assert group.start([sys.executable, "-c", "bytearray(100 << 20)"]).wait() != 0
            usage = group.usage()
            assert usage.failed > 0
            assert usage.killed == 1
            sleeper = group.start(["sleep", "100"])
    except OSError as error:
        pytest.skip(str(error))
    assert sleeper.returncode != 0
    assert not group._folder.exists()


@pytest.mark.parametrize(("delegates", "parent"), [("a/b", "a/b"), ("a", "a"), ("", "")])
def test_groups_of_version_2(module: Any, tmp_path: Path, delegates: str, parent: str) -> None:
    """A folder stands in for the file system of version 2."""
    groups = module("memory_group")
    root = tmp_path / "cgroup"
    (root / "a" / "b").mkdir(parents=True)
    for folder in ("", "a", "a/b"):
        held = "cpu memory\n" if folder == delegates else "cpu\n"
        (root / folder / "cgroup.subtree_control").write_text(held)
    (tmp_path / "own").write_text("0::/a/b\n")
    group = groups.MemoryGroup(LIMIT, root=root, own=tmp_path / "own").__enter__()
    folder = group._folder
    assert folder.parent == root / parent
    assert (folder / "memory.max").read_text() == str(LIMIT)
    (folder / "memory.peak").write_text("1000\n")
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert group.usage() == groups.Usage(LIMIT, peak=1000, failed=7, killed=1)
    shutil.rmtree(folder)


def test_without_a_memory_group(module: Any, tmp_path: Path) -> None:
    groups = module("memory_group")
    (tmp_path / "own").write_text("4:memory:/gone\n0::/\n")
    with (
        pytest.raises(OSError, match=r"no memory cgroup can be made in .*run as root"),
        groups.MemoryGroup(LIMIT, root=tmp_path, own=tmp_path / "own"),
    ):
        pass


def test_a_process_that_fails_says_why(module: Any, tmp_path: Path) -> None:
    remote = module("remote")
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no such thing')")
    with pytest.raises(remote.RemoteError, match="exit code 1: no such thing"):
        remote.Remote(script, {}, tmp_path / "log")
    script.write_text("print('hello')\nprint('{\"a\": 1}', flush=True)\nprint(input() and '{\"b\": 2}')")
    with remote.Remote(script, {}, tmp_path / "log") as one:
        assert (one.ready, one.train("one")) == ({"a": 1}, {"b": 2})
