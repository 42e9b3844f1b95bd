"""Runs over a base that stays on disk: those over a base in memory, bit for bit."""

import errno
import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run, only_line
from limited_runs import Watching, ask, decisions, die, interrupt, limit_for, replace_memory, submission
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.offload.disk import Disk
from mlora.offload.options import OffloadOptions
from mlora.run.run import resume, train
from stage_runs import assert_equal, run_stages
from sweep_data import sweep_data
from sweep_runs import table
from tiny_run import lines, run_data, save_base, weights, write_run

BLOCKS = 6
DISK: dict[str, Any] = {"base": "disk", "slots": 2}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used after its block has left is not a number."""
    monkeypatch.setattr("mlora.config.sections.OffloadOptions", partial(OffloadOptions, poison=True))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), layers=BLOCKS)


def run_of(data: dict[str, Any], folder: Path, reporter: Any = None) -> Path:
    assert train(resolve_config(data, folder=folder), reporter=reporter).exit_code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in memory."""
    folder = tmp_path_factory.mktemp("whole")
    return run_of(run_data(base, folder), folder)


def assert_same(one: Path, other: Path, adapters: int = 2) -> None:
    assert lines(one) == lines(other)
    assert weights(one) == weights(other)
    assert len(weights(one)) == adapters


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_run_alone(base: Path, whole: Path, tmp_path: Path, checkpointing: bool) -> None:
    data = run_data(base, tmp_path, offload=DISK, gradient_checkpointing=checkpointing)
    assert_same(run_of(data, tmp_path), whole)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["offload"]["base"] == "disk"


def test_weights_that_are_converted_go_to_the_folders(base: Path, tmp_path: Path) -> None:
    found = []
    for name, offload in (("memory", {}), ("disk", {**DISK, "folders": ["one", "two"]})):
        folder = tmp_path / name
        for scratch in ("one", "two"):
            (folder / scratch).mkdir(parents=True)
        data = run_data(base, folder, bf16=True, offload=offload)
        data["adapters"][0] |= {"max_steps": 2}
        data["adapters"][1] |= {"max_steps": 3}
        found.append(run_of(data, folder))
    assert_same(*found)
    assert not [*(tmp_path / "disk" / "one").iterdir(), *(tmp_path / "disk" / "two").iterdir()]


def test_each_stage_streams_its_own_blocks(base: Path, tmp_path: Path) -> None:
    """Two processes, against two threads over a base in memory."""
    found = []
    for name, offload in (("threads", {}), ("processes", DISK)):
        folder = tmp_path / name
        folder.mkdir()
        pipeline = {"stages": 2, "partition": [3, 3]}
        data = run_data(base, folder, pipeline=pipeline, offload=offload)
        if offload:
            codes, _, errors = run_stages(["train", write_run(folder, data)], 2)
            assert codes == [0, 0], errors
            assert errors == ["", ""]
        else:
            run_of(data, folder)
        found.append(folder / "run")
    assert_equal(*found)


def test_each_stage_plans_its_own_activations(base: Path, tmp_path: Path) -> None:
    found, told = [], []
    for name, offload in (("memory", {}), ("planned", {**DISK, "activations": "auto"})):
        folder = tmp_path / name
        folder.mkdir()
        data = run_data(base, folder, pipeline={"stages": 2, "partition": [3, 3]}, offload=offload)
        reporter = Watching({})
        found.append(run_of(data, folder, reporter))
        told.append(reporter.lines)
    assert_equal(*found)
    planned = [line.partition(":")[0] for line in told[1] if "activations of blocks" in line]
    assert planned == ["stage 0", "stage 1"]
    assert not any("activations of blocks" in line for line in told[0])


def test_reads_have_a_track_of_each_stage(base: Path, tmp_path: Path) -> None:
    data = run_data(base, tmp_path, pipeline={"stages": 2, "partition": [3, 3]}, offload=DISK)
    train(resolve_config(data, folder=tmp_path), trace=True)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(stage for (stage, _), name in tracks.items() if name == "read") == [0, 1]
    spans = [e for e in events if e["ph"] == "X"]
    reads = [e for e in spans if tracks[e["pid"], e["tid"]] == "read"]
    computed = [e for e in spans if tracks[e["pid"], e["tid"]] == "compute"]
    own = {(n // 3, f"block {n}") for n in range(BLOCKS)}
    assert {(e["pid"], e["name"]) for e in reads} <= own  # a block that never leaves was read before
    assert len(reads) > 5 * BLOCKS
    assert all(e["dur"] > 0 for e in reads)
    assert max(e["ts"] for e in reads) < max(e["ts"] + e["dur"] for e in computed)


def change_offload(run: Path, offload: dict[str, Any]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"offload": offload}))


def test_where_the_base_is_may_change_when_a_run_resumes(base: Path, whole: Path, tmp_path: Path) -> None:
    data = run_data(base, tmp_path, offload=DISK)
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(data, folder=tmp_path), reporter=Watching({5: die}))
    change_offload(tmp_path / "run", {})
    assert resume(tmp_path / "run", reporter=Watching({3: interrupt})).status == "interrupted"
    change_offload(tmp_path / "run", {"base": "disk", "slots": 4})
    assert resume(tmp_path / "run").exit_code == 0
    assert_same(tmp_path / "run", whole)


def test_tasks_that_wait_come_and_give_way(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task fits at a time; one of a higher priority comes and sets the first one aside."""
    replace_memory(monkeypatch)
    found = []
    for name, offload in (("memory", {}), ("disk", DISK)):
        folder = tmp_path / name
        folder.mkdir()
        data = run_data(base, folder, offload=offload, scheduler={"memory_limit": limit_for(1)})
        short = {"max_steps": 3, "gradient_accumulation_steps": 1, "eval_dataset": None, "eval_steps": None}
        data["adapters"] = [adapter | short for adapter in data["adapters"]]
        content = submission(data, folder, "urgent", priority=9)
        watching = Watching({("first", 2): partial(ask, folder / "run", "submit", "urgent", content)})
        found.append(run_of(data, folder, watching))
        assert watching.waiting[0] == ["second"]
        order = list(dict.fromkeys(name for name, _ in watching.steps))
        assert order == ["first", "urgent", "second"]
        assert watching.steps.index(("urgent", 3)) < watching.steps.index(("first", 3))
    assert decisions(found[0]) == decisions(found[1])
    assert_same(*found, adapters=3)


def test_a_sweep(base: Path, tmp_path: Path) -> None:
    found = []
    for name, offload in (("memory", {}), ("disk", DISK)):
        folder = tmp_path / name
        folder.mkdir()
        search = {"lora": {"r": {"choice": [2, 5]}}, "learning_rate": {"choice": [1e-3, 1e-2]}}
        data = sweep_data(base, folder, sampler="grid", trials=None, places=2, search=search)
        data["defaults"]["max_steps"] = 2
        found.append(run_of(data | {"offload": offload}, folder))
    assert_same(*found, adapters=4)
    ranked = [[(row["trial"], row["eval_loss"]) for row in table(run)] for run in found]
    assert ranked[0] == ranked[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size // 2), "ended after"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "the file was written since it was open"),
    ],
    ids=["cut short", "overwritten"],
)
def test_a_file_that_changes_while_it_trains_is_named_and_the_run_goes_on(
    base: Path, whole: Path, tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    path = base / "model.safetensors"
    content = path.read_bytes()
    data = run_data(base, tmp_path, offload=DISK)
    try:
        with pytest.raises(
            RunError, match=rf"^iteration \d+: .*/model\.safetensors: reading \d+ bytes at .*{message}"
        ) as error:
            train(resolve_config(data, folder=tmp_path), reporter=Watching({5: partial(change, path)}))
    finally:
        path.write_bytes(content)
    assert f"go on with `mlora resume {tmp_path / 'run'}`" in str(error.value)
    assert resume(tmp_path / "run").exit_code == 0
    assert_same(tmp_path / "run", whole)


def test_a_file_that_another_one_replaces_is_read_to_the_end(base: Path, whole: Path, tmp_path: Path) -> None:
    path = base / "model.safetensors"
    content = path.read_bytes()
    (tmp_path / "other").write_bytes(bytes(len(content)))
    data = run_data(base, tmp_path, offload=DISK)
    reporter = Watching({5: partial(os.replace, tmp_path / "other", path)})
    try:
        assert_same(run_of(data, tmp_path, reporter), whole)
    finally:
        path.write_bytes(content)


def test_validate_says_what_lives_where(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_memory(monkeypatch)
    path = write_run(tmp_path, run_data(base, tmp_path, offload=DISK))

    def shown(*settings: str) -> list[list[str]]:
        result = run("validate", path, *[word for one in settings for word in ("--set", one)])
        assert result.exit_code == 0, result.stderr
        return [re.split("  +", line.strip()) for line in result.stdout.splitlines()]

    block = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    rows = shown()
    assert ["where", "size"] in rows
    assert ["base model, weights of blocks", "disk", f"{BLOCKS * block / 1024:.0f} KiB"] in rows
    resident = 4 * (2 * 260 * 32 + (2 * BLOCKS + 1) * 32)  # embedding, head and norms, and some constants
    (stays,) = [row[2] for row in rows if row[:2] == ["base model, what stays", "memory"]]
    assert 0 <= int(stays.removesuffix(" KiB")) - resident // 1024 <= 2
    assert "base model, slots for blocks" in [row[0] for row in rows]
    first, second = 4 * (64 + 48 + 48 + 64 + 3 * 80), 7 * (64 + 48)  # weights of a block
    assert ["optimizer states", "memory", f"{2 * 4 * BLOCKS * (first + second) / 1024:.0f} KiB"] in rows
    assert ["activations", "memory"] in [row[:2] for row in rows]
    assert [f"{BLOCKS * block / 1024:.0f} KiB of weights are read from the model's own files"] in rows
    monkeypatch.setattr("mlora.run.validation._plan", lambda *_: None)
    rows = shown("pipeline.stages=2", "bf16=true", "offload.folders=[.]")
    assert ["base model, weights of blocks", "disk", *(f"{n * block / 2048:.0f} KiB" for n in (3, 3))] in rows
    assert any(row[0].endswith(f"converts them into scratch files in {tmp_path}") for row in rows)
    assert ["base model", "memory"] in [row[:2] for row in shown("offload.base=host")]
    assert "base model" not in [row[0] for row in shown("offload={}")]


def test_folders_that_are_missing(run: Run, base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(base, tmp_path, offload=DISK))
    (tmp_path / "there").mkdir()
    folders = ["--set", "offload.folders=[there, gone]"]
    for more in ([], ["--set", "pipeline.stages=2"]):
        line = only_line(run("train", path, *folders, *more))
        assert line == f"error: offload.folders[1]: no such folder: {tmp_path}/gone"
    assert only_line(run("validate", path, *folders)) == line
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_is_found_serves_no_base_on_disk(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora.run.prepare.choose_device", lambda *_: "cuda")
    data = run_data(base, tmp_path, offload=DISK)
    del data["device"]
    with pytest.raises(RunError, match=r"^offload\.base: disk serves the CPU so far, got device cuda$"):
        train(resolve_config(data, folder=tmp_path))


def test_a_disk_without_room_for_the_converted_weights(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Disk, size: int) -> Any:
        raise OSError(errno.ENOSPC, f"no scratch file of {size} bytes can be made there", self.folders[0])

    monkeypatch.setattr(Disk, "scratch", full)
    data = run_data(base, tmp_path, bf16=True, offload={**DISK, "folders": ["."]})
    with pytest.raises(
        RunError, match=rf"^offload\.folders: {tmp_path}: no scratch file of \d+ bytes can be"
    ):
        train(resolve_config(data, folder=tmp_path))
