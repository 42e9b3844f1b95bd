"""Real runs under a hard limit on what the process has resident: none runs out of it, and it is used."""

import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 2**20
RUNS = 20
VOCABULARY = 4000
GROUPS = Path("/sys/fs/cgroup/memory")
RUN = """
import atexit, sys
path, *sys.argv[1:] = sys.argv[1:]
def note():
    lines = open('/proc/self/status').read().splitlines()
    open(path, 'w').write(next(line.split()[1] for line in lines if line.startswith('VmHWM')))
atexit.register(note)
from mlora.cli.app import main
main()
"""


@contextmanager
def hard_limit(size: int) -> Iterator[list[str]]:
    """A command line's begin that puts a process under the kernel's limit; none where there is no such."""
    own = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    path = next((line.split(":", 2)[2] for line in own if line.split(":")[1] == "memory"), None)
    group = None if path is None else GROUPS / path.lstrip("/") / f"mlora-{os.getpid()}-{time.monotonic_ns()}"
    try:
        if group is not None:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(size))
    except OSError:
        group = None
    if group is None:
        yield []
        return
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


def run_of(dice: random.Random, folder: Path, base: Path, tasks: int, limit: int) -> Path:
    """A run of random tasks on sequences of random lengths."""
    datasets = []
    for name in "abc":
        shortest, longest = sorted(dice.choices([20, 60, 120, 240, 400], k=2))
        lines = []
        for _ in range(120):
            length = dice.randint(shortest, longest + 1)
            lines.append(json.dumps({"input_ids": [dice.randrange(VOCABULARY) for _ in range(length)]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        datasets.append({"name": name, "path": f"{name}.jsonl", "format": "tokens"})
    targets = ["all-linear", ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]]
    adapters: list[dict[str, Any]] = []
    for number in range(tasks):
        lora = {
            "r": dice.choice([4, 8, 16, 32]),
            "target_modules": dice.choice(targets),
            "lora_dropout": dice.choice([0.0, 0.1]),
        }
        adapters.append(
            {
                "name": f"t{number}",
                "dataset": dice.choice("abc"),
                "lora": lora,
                "priority": dice.choice([0, 0, 1]),
                "max_steps": dice.randint(3, 8),
                "per_device_train_batch_size": dice.choice([2, 4, 6]),
                "gradient_accumulation_steps": dice.choice([1, 1, 2]),
                "optim": dice.choice(["adamw_torch_fused", "adamw_torch", "sgd"]),
            }
        )
    data = {
        "base_model": str(base),
        "output_dir": "run",
        "device": "cpu",
        "bf16": dice.random() < 0.25 and torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # else minutes a step
        "gradient_checkpointing": dice.random() < 0.3,
        "defaults": {"max_length": 400, "save_steps": dice.choice([None, 4])},
        "datasets": datasets,
        "adapters": adapters,
        "scheduler": {"memory_limit": limit, "policy": dice.choice(["fcfs", "shortest_first"])},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.soak  # a minute
@pytest.mark.timeout(600)
def test_what_validate_calls_ready_trains_after_the_process_has_grown(tmp_path: Path) -> None:
    """Large twins under a limit that holds one of them as a process begins, with little to spare."""
    path = _twins(tmp_path)
    needed = _needed(path, 9999)
    for spare in (45, 100):  # 32 are the least reserve, 5 the margin
        limit = needed + spare
        _needed(path, limit)
        with hard_limit(limit * MIB) as before:
            command = [*before, sys.executable, "-c", RUN, str(tmp_path / "peak")]
            more = ["--overwrite", "--set", f"scheduler.memory_limit={limit}MiB"]
            done = _run([*command, "train", str(path), *more])
            peak = int((tmp_path / "peak").read_text()) / 1024
            # the second twin may have to wait for a new process
            if grown := done.returncode == 1 and "not enough memory in this process" in done.stderr:
                done = _run([*command, "resume", str(tmp_path / "run")])
                peak = max(peak, int((tmp_path / "peak").read_text()) / 1024)
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
        print(f"{spare} MiB to spare: limit {limit} MiB, peak {peak:.0f} MiB, resumed: {grown}")
        assert peak <= limit


def _needed(path: Path, limit: int) -> int:
    """What validate says that the base and the largest task need; all are ready."""
    command = [sys.executable, "-m", "mlora", "validate", str(path)]
    shown = _run([*command, "--set", f"scheduler.memory_limit={limit}MiB"]).stdout
    assert "4 adapters are ready to train" in shown
    sizes = re.findall(r"^(base|large).* (\d+) MiB", shown, re.MULTILINE)
    return int(sizes[0][1]) + max(int(size) for _, size in sizes[1:])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _twins(folder: Path) -> Path:
    """Two large tasks and two small ones."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(**shape, num_key_value_heads=4, vocab_size=VOCABULARY, max_position_embeddings=512)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    dice = random.Random(0)
    samples = [[dice.randrange(VOCABULARY) for _ in range(dice.randint(12, 24))] for _ in range(200)]
    (folder / "d.jsonl").write_text("\n".join(json.dumps({"input_ids": ids}) for ids in samples))
    large = {"per_device_train_batch_size": 64, "lora": {"r": 128, "target_modules": "all-linear"}}
    small = {"per_device_train_batch_size": 4, "lora": {"r": 8, "target_modules": ["q_proj", "v_proj"]}}
    kinds = {"large-0": large, "large-1": large, "small-0": small, "small-1": small}
    data = {
        "base_model": str(folder / "base"),
        "output_dir": "run",
        "device": "cpu",
        "datasets": [{"name": "d", "path": "d.jsonl", "format": "tokens"}],
        "adapters": [{"name": name, "dataset": "d", "max_steps": 6, **kind} for name, kind in kinds.items()],
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.soak  # half an hour
@pytest.mark.timeout(7200)
def test_no_run_exceeds_its_limit(tmp_path: Path) -> None:
    seed = int(os.environ.get("MLORA_SOAK_SEED", time.time()))
    print("seed", seed)
    dice = random.Random(seed)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    used = []
    for number in range(RUNS):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        limit = dice.randint(800, 1200) * MIB
        path = run_of(dice, folder, tmp_path / "base", dice.randint(10, 20), limit)
        with hard_limit(limit) as before:
            command = [*before, sys.executable, "-c", RUN, str(folder / "peak"), "train", str(path)]
            began = time.monotonic()
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (number, done.returncode, done.stderr[-2000:])
        peak = int((folder / "peak").read_text()) * 1024
        waited = _waited(folder / "run")
        seconds = time.monotonic() - began
        print(
            f"run {number}: {'hard, ' if before else ''}limit {limit // MIB} MiB, peak {peak / limit:.3f}, "
            f"{waited} decisions with tasks waiting, {seconds:.0f} s",
            flush=True,
        )
        assert peak <= limit, number
        if waited > 3:
            used.append(peak / limit)
    print("used:", sorted(round(share, 3) for share in used), "median", round(median(used), 3))
    assert len(used) >= RUNS // 2
    assert min(used) >= 0.85


def _waited(run: Path) -> int:
    """At how many decisions a task waited: it was not admitted, and was later."""
    with sqlite3.connect(run / "queue.sqlite") as connection:
        entries = connection.execute("SELECT entry FROM journal ORDER BY iteration DESC").fetchall()
    later: set[str] = set()
    count = 0
    for (entry,) in entries:
        admitted = set(json.loads(entry)["admission"]["slots"])
        count += bool(later - admitted)
        later |= admitted
    return count
