"""Compare what two checkouts train, bit for bit: metrics, adapters and checkpoints of six runs.

Usage: python .ci/same_results.py BEFORE AFTER [--out FOLDER] [--only RUN ...]

BEFORE and AFTER are checkouts with their compiled libraries. Each run is trained once from each checkout, by
the interpreter that runs this script: the quickstart, the quickstart over two stages, a sweep, a run under a
memory limit in which a submitted task preempts others, a run that is interrupted and resumed, and DoRA, DPO
and a classifier over two stages of a base in 8 bits, which needs torchao. What a clock or a memory meter says
is not compared. Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEADY = ["--set", "base_gemm=aten"]  # else each process measures which library is faster, and rounds by that
SAVED = ["--set", "defaults.save_steps=50", "--set", "save_total_limit=20"]
BY_CLOCK = ("seconds", "peak_memory_bytes")
BY_PLACE = ".saved.adapter_config.json"  # the digest of a file that names the base's folder, in each checkout

# Run in a checkout. Its own tests say how memory is replaced, so that the limit means the same everywhere.
PREAMBLE = """
import sys
from pathlib import Path
import pytest, mlora
from mlora.{config_file} import resolve_config
from tests.mlora.limited_runs import Watching, ask, five_tasks, interrupt, replace_memory, submission
from tests.mlora.tiny_run import save_base
out = Path(sys.argv[1])
work = out.parent / (out.name + "-data")
work.mkdir(parents=True)
data = five_tasks(save_base(work / "base"), work) | {{"output_dir": str(out), "save_total_limit": 20}}
"""
UNDER_A_LIMIT = """
urgent = submission(data, work, "urgent", priority=9)
with pytest.MonkeyPatch.context() as patch:
    replace_memory(patch)
    told = Watching({("high", 1): lambda: ask(out, "submit", "urgent", urgent)})
    result = mlora.train(resolve_config(data, folder=work), reporter=told)
assert result.status == "finished", told.lines
assert any("first" in names for names in told.waiting), "nobody gave way"
"""
INTERRUPTED = """
told = Watching({("second", 3): interrupt})
result = mlora.train(resolve_config(data | {"scheduler": {}}, folder=work), reporter=told)
assert result.status == "interrupted", told.lines
"""
MIXED = """
import sys, yaml
from pathlib import Path
examples, path = Path(sys.argv[1]), Path(sys.argv[2])
small = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
pairs, kinds = examples / "data/sort-pairs.jsonl", examples / "labels/kinds-train.jsonl"
path.parent.mkdir(parents=True, exist_ok=True)
path.write_text(yaml.safe_dump({
    "base_model": str(examples / "tiny-base"), "output_dir": str(path.with_suffix("")), "device": "cpu",
    "quantization": {"method": "torchao-int8"},
    "pipeline": {"stages": 2, "partition": [3, 2]},
    "defaults": {"max_steps": 30, "per_device_train_batch_size": 4, "max_length": 64, "save_steps": 10},
    "save_total_limit": 20,
    "datasets": [
        {"name": "pairs", "path": str(pairs), "format": "preference"},
        {"name": "kinds", "path": str(kinds), "format": "classification"},
        {"name": "sums", "path": str(examples / "data/sums.jsonl"), "format": "prompt_completion"}],
    "adapters": [
        {"name": "dora", "dataset": "sums", "lora": {**small, "use_dora": True, "lora_dropout": 0.1}},
        {"name": "dpo", "dataset": "pairs", "objective": "dpo", "lora": small},
        {"name": "kinds", "dataset": "kinds", "num_labels": 4, "lora": {**small, "task_type": "SEQ_CLS"}},
        {"name": "plain", "dataset": "sums", "lora": {"r": 4, "target_modules": "all-linear"}}]}))
"""


def commands(checkout: Path, out: Path) -> dict[str, list[list[str]]]:
    """Returns, for each run, the commands that train it; each writes to `out/RUN`."""
    quick, sweep = checkout / "examples" / "quickstart.yaml", checkout / "examples" / "sweep.yaml"
    train = [sys.executable, "-m", "mlora", "train"]

    def to(name: str) -> list[str]:
        return ["--set", f"output_dir={out / name}"]

    stages = ["--set", "pipeline.stages=2", "--set", "pipeline.partition=[3, 2]"]
    short = ["--set", "defaults.max_steps=60"]
    new = (checkout / "python" / "mlora" / "config" / "config_file.py").is_file()
    begin = PREAMBLE.format(config_file="config.config_file" if new else "config_file")
    return {
        "quickstart": [[*train, str(quick), *STEADY, *SAVED, *to("quickstart")]],
        "two-stages": [[*train, str(quick), *STEADY, *SAVED, *stages, *to("two-stages")]],
        "sweep": [[*train[:-1], "sweep", str(sweep), *STEADY, *SAVED, *short, *to("sweep")]],
        "limit": [[sys.executable, "-c", begin + UNDER_A_LIMIT, str(out / "limit")]],
        "resumed": [
            [sys.executable, "-c", begin + INTERRUPTED, str(out / "resumed")],
            [sys.executable, "-m", "mlora", "resume", str(out / "resumed")],
        ],
        "mixed": [
            [sys.executable, "-c", MIXED, str(checkout / "examples"), str(out / "mixed.yaml")],
            [*train, str(out / "mixed.yaml"), *STEADY],
        ],
    }


def trained(checkout: Path, out: Path, only: list[str]) -> None:
    """Trains the runs of one checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "python"), str(checkout)])}
    for name, lines in commands(checkout, out).items():
        if only and name not in only:
            continue
        for command in lines:
            done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{checkout}: {name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl` without what a clock or a meter says."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in BY_CLOCK} for line in lines]


def adapters(run: Path) -> dict[str, bytes]:
    """Returns the weight files of a run's adapters."""
    return {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.glob("**/adapter_model.safetensors"))}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the plain values and tensors of nested dicts and lists, with what leads to them."""
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def checkpoints(run: Path) -> dict[str, list[Any]]:
    """Returns, for each checkpoint, its iteration, its tasks' progress, and its adapters' states."""
    import torch

    found = {}
    for path in sorted((run / "checkpoints").glob("step-*.pt")):
        payload = torch.load(path, weights_only=True)
        kept = {key: payload[key] for key in ("iteration", "tasks", "total_steps", "data", "adapters")}
        # what divides a loss was always the tokens before checkpoints had units
        flat = [
            (key.replace(".units", ".tokens"), value)
            for key, value in leaves(kept)
            if not key.endswith((".seconds", ".open_units", BY_PLACE))
        ]
        found[path.name] = [
            (key, (value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()))
            if isinstance(value, torch.Tensor)
            else (key, value)
            for key, value in flat
        ]
    return found


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yields what differs between two runs, as lines."""
    for what, read in (("metrics", metrics), ("adapters", adapters), ("checkpoints", checkpoints)):
        one, other = read(before), read(after)
        size = len(one)
        if not size:
            yield f"{before.name}: {what}: nothing to compare"
        if one != other:
            yield f"{before.name}: {what} differ: {first_difference(one, other)}"
        else:
            print(f"{before.name}: {size} {'lines of metrics' if what == 'metrics' else what} equal")


def first_difference(one: Any, other: Any) -> str:
    """Says where two values differ first."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{sorted(one)} and {sorted(other)}"
        key = next(key for key in one if one[key] != other[key])
        return f"{key}: {first_difference(one[key], other[key])}"
    if isinstance(one, list) and isinstance(other, list):
        pairs = [f"{str(a)[:200]} and {str(b)[:200]}" for a, b in zip(one, other, strict=False) if a != b]
        return pairs[0] if pairs else f"{len(one)} and {len(other)} entries"
    return f"{str(one)[:200]} and {str(other)[:200]}"


def main() -> int:
    """Trains, compares and prints; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--out", type=Path, help="keeps the runs there; BEFORE's are reused if they are there"
    )
    parser.add_argument("--only", nargs="*", default=[], help="names of runs")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = chosen.out or Path(scratch)
        if not (out / "before").is_dir():
            trained(chosen.before.resolve(), out.resolve() / "before", chosen.only)
        shutil.rmtree(out / "after", ignore_errors=True)
        trained(chosen.after.resolve(), out.resolve() / "after", chosen.only)
        names = [p.name for p in sorted((out / "after").iterdir()) if (p / "metrics.jsonl").is_file()]
        found = [line for name in names for line in differences(out / "before" / name, out / "after" / name)]
    for line in found:
        print(line, file=sys.stderr)
    print("not equal" if found else f"equal: {', '.join(names)}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
