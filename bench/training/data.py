"""What tokenised data takes in memory, and how soon a run over a million samples begins to train.

    python -m bench data                  # results/data.{json,txt}
    python -m bench data --quick --out /tmp/data

Memory: 10 million tokens in 50,000 samples, a quarter of each not trained, read from jsonl of token ids. A
process reads all samples once; its resident memory, less what it had before, is divided by the tokens.
`table` is what runs have: a file that is mapped into memory. `tuples` is a list of Python tuples.

Start: `mlora train` over jsonl of prompts and completions, and `mlora resume` after SIGINT. The time goes
from the start of the process to the line of its first step in metrics.jsonl. 2,000 samples show what the
process itself takes. `first` tokenises, `shared` does so in two processes; `again` finds the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared import machine
from shared.harness import Found, measured

BASE = Path(__file__).resolve().parents[2] / "examples" / "tiny-base"
LENGTH = 200


def write_ids(path: Path, samples: int) -> None:
    """Writes samples of token ids, the first quarter of each not trained."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(samples):
            ids = [draw.randrange(50_000) for _ in range(LENGTH)]
            labels = [-100] * (LENGTH // 4) + ids[LENGTH // 4 :]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")


def resident() -> dict[str, int]:
    """Returns this process's resident bytes: all, and those that no file holds."""
    return {"all": machine.resident("VmRSS"), "own": machine.resident("RssAnon")}


def measure_memory(kind: str, path: Path, cache: Path) -> None:
    """Prints the bytes that the samples of a file take, per token, as JSON; in a process of its own."""
    from mlora.data.dataset import load_dataset
    from mlora.data.record import Sample

    how = {"format": "tokens", "max_length": LENGTH, "vocab_size": 50_000, "cache": cache}
    samples = load_dataset("d", path, **how).samples  # makes the table, and loads what that needs
    tokens = samples.tokens
    del samples
    gc.collect()
    before = resident()
    found = load_dataset("d", path, **how).samples
    held: list[Sample] = []
    for sample in found:
        if kind == "tuples":
            held.append(Sample(tuple(sample.input_ids), tuple(sample.labels)))
    if kind == "tuples":
        del found
    gc.collect()
    after = resident()
    print(json.dumps({name: (after[name] - before[name]) / tokens for name in after}))


def write_sums(path: Path, samples: int) -> None:
    """Writes prompts with completions."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(samples):
            a, b = draw.randrange(100), draw.randrange(100)
            file.write(json.dumps({"prompt": f"{a} + {b} = ", "completion": str(a + b)}) + "\n")


def seconds_to_step(command: list[str], run: Path) -> float:
    """Starts a run, waits for its next step, interrupts it, and returns the seconds until that step."""
    metrics = run / "metrics.jsonl"
    known = metrics.stat().st_size if metrics.exists() else 0
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "mlora", *command], stdout=subprocess.DEVNULL)
    try:
        while not (metrics.exists() and _steps_after(metrics, known)):
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            time.sleep(0.01)
        return time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _steps_after(metrics: Path, known: int) -> bool:
    """Whether a step was written behind the first `known` bytes; a new run's file is shorter."""
    text = metrics.read_bytes()
    return b'"loss"' in text[known if len(text) >= known else 0 :]


def measure_start(folder: Path, samples: int, rounds: int) -> dict[str, float]:
    """Returns the seconds until the first step of first starts, of others, and of resumes: medians."""
    data, run, config = folder / f"{samples}.jsonl", folder / "run", folder / "run.yaml"
    write_sums(data, samples)
    adapter = {"name": "a", "dataset": "d", "lora": {"r": 4, "target_modules": ["q_proj"]}}
    defaults = {"max_steps": 10**6, "per_device_train_batch_size": 8, "max_length": 64, "save_steps": 10**5}
    written = {
        "base_model": str(BASE),
        "output_dir": str(run),
        "device": "cpu",
        "defaults": defaults,
        "datasets": [{"name": "d", "path": str(data), "format": "prompt_completion"}],
        "adapters": [adapter],
    }
    train = ["train", str(config), "--overwrite"]
    found: dict[str, list[float]] = {"first": [], "shared": [], "again": [], "resume": []}
    for name in ["first", "shared", *["again", "resume"] * rounds]:
        processes = 2 if name == "shared" else 1
        cache = str(folder / f"cache-{samples}-{processes}")
        config.write_text(json.dumps({**written, "data_cache": cache, "dataset_num_proc": processes}))
        if name in ("shared", "again"):
            (run / "metrics.jsonl").unlink()
        found[name].append(seconds_to_step(["resume", str(run)] if name == "resume" else train, run))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def measure(options: argparse.Namespace) -> Found:
    """Measures memory and starts."""
    samples, many = (2_000, 4_000) if options.quick else (50_000, 1_000_000)
    memory, lines = {}, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_ids(folder / "ids.jsonl", samples)
        for kind in ("table", "tuples"):
            words = ["--memory-of", kind, folder / "ids.jsonl", folder / "cache"]
            done = subprocess.run([*machine.BENCH, "data", *words], check=True, stdout=subprocess.PIPE)
            memory[kind] = json.loads(done.stdout)
            whole, own = memory[kind]["all"], memory[kind]["own"]
            lines.append(f"{kind:8} {whole:6.2f} bytes a token resident, {own:6.2f} of them in no file")
        start = {str(count): measure_start(folder, count, options.turns) for count in (2_000, many)}
    for count, seconds in start.items():
        told = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
        lines.append(f"{int(count):9,} samples: seconds to the first step: {told}")
    return Found({"memory": memory, "start": start}, lines)


def main() -> int:
    """Measures, prints, and writes the results; a process of its own reads samples."""
    if sys.argv[1:2] == ["--memory-of"]:
        kind, path, cache = sys.argv[2:]
        measure_memory(kind, Path(path), Path(cache))
        return 0
    return measured(__doc__, measure, out="data", turns=3)
