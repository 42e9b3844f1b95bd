"""The benchmark of offloading: its contenders train alike, its arithmetic is right, and no plan of another
out-of-core system is predicted to be faster than ours; no time is judged.
"""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

LIMIT = 64 << 20


@pytest.fixture
def module(bench_folder: Path) -> Any:
    return lambda name: import_module(f"offload.{name}")


@pytest.mark.nightly
def test_parts_run(bench_folder: Path, tmp_path: Path) -> None:
    """The folder of temporary files must be on a disk."""
    parts, out = ["adamw", "stream", "adapters"], tmp_path / "out"
    command = [
        sys.executable,
        bench_folder / "__main__.py",
        "offload",
        *parts,
        "--quick",
        "--folder",
        tmp_path,
    ]
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
        module("stream").check_equal(losses)
    for name in ("serial", "overlapped"):
        stream = contenders.stream_of(engines[name])
        loads, read = contenders.reads_of_a_step(stream)
        before = stream.loads
        contenders.train(engines[name], batch)
        assert stream.loads - before == loads == 2 * (5 - 3)
        assert read >= loads * size / 5
    losses["mmap"]["a0"] += 1e-9 * losses["mmap"]["a0"]
    with pytest.raises(RuntimeError, match="losses of mmap and resident differ"):
        module("stream").check_equal(losses)


def test_a_folder_in_memory_is_refused(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = module("base")
    assert base.file_system(Path("/proc")) == "proc"
    assert base.file_system(tmp_path) == base.file_system(tmp_path / "missing")
    monkeypatch.setattr(base, "file_system", lambda folder: "tmpfs")
    with pytest.raises(OSError, match="is on tmpfs, which is in memory; give --folder on a disk"):
        base.check_disk(tmp_path)


def test_efficiency_is_the_share_that_was_hidden(module: Any) -> None:
    stream = module("stream")
    turn = {
        "resident": {"seconds": 2.0},
        "serial, 3 slots": {"seconds": 3.0},
        "overlapped, 3 slots": {"seconds": 2.2},
        "I/O alone, 3 slots": {"seconds": 1.0},
    }
    assert stream.efficiency_of(turn, 3) == pytest.approx(0.8)


def test_tokens_that_hide_the_streaming(module: Any) -> None:
    """1024 tokens take 4 s, and reading the base twice takes 2 s, of which a step reads three quarters."""
    packed = module("adapters")
    turn = {"resident 16": {"seconds": 4.0}, "I/O alone": {"seconds": 1.5}}
    assert packed.hiding_tokens(turn, passes=1.5) == pytest.approx(512)
    for rows, lengths in ((1, [1]), (64, [64]), (65, [33, 32]), (1700, [107] * 4 + [106] * 12)):
        assert packed.split(rows) == lengths


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
        remote.Remote([sys.executable, str(script)], {}, tmp_path / "log")
    script.write_text("print('hello')\nprint('{\"a\": 1}', flush=True)\nprint(input() and '{\"b\": 2}')")
    with remote.Remote([sys.executable, str(script)], {}, tmp_path / "log") as one:
        assert (one.ready, one.train("one")) == ({"a": 1}, {"b": 2})


def tiny() -> Any:
    return import_module("shared.shapes").ModelShape(64, 128, heads=2, kv_heads=2, layers=3, vocabulary=64)


def test_efficiency_and_the_bound_on_the_ratio_to_naive(module: Any) -> None:
    gradients = module("optimizer")
    seconds = {"serial": 8.0, "naive": 7.0, "optimised": 6.0, "no optimizer": 5.0, "optimizer alone": 2.5}
    turn = {name: {"seconds": value} for name, value in seconds.items()}
    turn["no optimizer"] |= {"forward": 1.0, "backward": 4.0}
    assert gradients.efficiency(turn) == pytest.approx(2 / 2.5)
    assert gradients.over_naive(turn) == {"ratio": pytest.approx(7 / 6), "bound": pytest.approx(7 / 5)}


def test_losses_are_equal_whenever_weights_are_updated(module: Any, tmp_path: Path) -> None:
    gradients, models = module("optimizer"), module("base")
    ids = models.random_tokens(16, tiny().vocabulary)
    losses = {}
    for name, how in gradients.CONTENDERS.items():
        tuned = models.Tuned(tiny(), folders=[tmp_path], **how)
        for _ in range(2):
            tuned.update() if name == gradients.ALONE else tuned.step(ids)
        tuned.close()
        losses[name] = tuned.losses
    assert losses.pop(gradients.ALONE) == []
    first = losses[gradients.SERIAL]
    assert first[1] < first[0]
    assert losses.pop(gradients.NONE) == [first[0], first[0]]
    assert all(found == first for found in losses.values())


def test_swapped_and_recomputed_blocks_give_the_same_bits(module: Any, tmp_path: Path) -> None:
    models = module("base")
    swapping = module("swap").Swapping(models.random_llama(tiny()), tmp_path)
    ids = models.random_tokens(512, tiny().vocabulary)
    sizes = swapping.bytes_of_blocks(ids)
    plans = (["keep"] * 3, ["recompute"] * 3, ["recompute", "swap", "swap"])
    found = [swapping.step(plan, ids) for plan in plans]
    written = swapping._space.written
    swapping.close()
    assert len({(one.loss, one.gradient) for one in found}) == 1
    assert found[0].gradient != 0
    assert written == sum(sizes[1:]) > 0


@pytest.mark.parametrize(("fits", "known"), [(5, 0), (5, 3), (0, 0), (9, 2)])
def test_the_largest_model_is_found(
    module: Any, fits: int, known: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest, base = module("limits"), module("base")
    killed = module("remote").RemoteError("was killed", killed=True)

    def train(job: dict[str, Any], *_: object) -> dict[str, Any]:
        if json.loads((Path(job["base"]) / "config.json").read_text())["num_hidden_layers"] > fits:
            raise killed
        return {"seconds": 1.0, "peak": 1}

    monkeypatch.setattr(largest, "train_once", train)
    shape = import_module("shared.shapes").ModelShape(8, 8, heads=1, kv_heads=1, layers=9, vocabulary=8)
    base.write_base(tmp_path, shape)
    tried = largest.Tried(tmp_path, shape, largest.CONTENDERS["recomputed"])
    assert tried.largest(known) == fits
    assert len(tried.found) <= 7


def test_a_model_of_the_first_blocks_loads(module: Any, tmp_path: Path) -> None:
    largest, base = module("limits"), module("base")
    from transformers import LlamaForCausalLM

    base.write_base(tmp_path, tiny())
    whole = LlamaForCausalLM.from_pretrained(tmp_path)
    few = LlamaForCausalLM.from_pretrained(largest.first_blocks(tmp_path, 2))
    assert len(few.model.layers) == 2
    for block, other in zip(few.model.layers, whole.model.layers, strict=False):
        assert torch.equal(block.mlp.up_proj.weight, other.mlp.up_proj.weight)
    assert torch.equal(few.lm_head.weight, whole.lm_head.weight)
