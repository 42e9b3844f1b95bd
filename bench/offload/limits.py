"""Parts `capacity`, `full` and `largest`: what trains in a memory cgroup, against the same without one.

In each, the first process has read the files of the libraries. Their pages are not counted as the second
one's, as they are not where several processes use them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shared.harness import Found, Target, table
from shared.shapes import ModelShape
from shared.timing import cores

from offload.base import (
    FULL_SHAPE,
    QUICK_FULL,
    QUICK_SHAPE,
    SHAPE,
    parameters_in_blocks,
    sizes_of,
    write_base,
)
from offload.remote import RemoteError, ours

LIMIT = 1 << 30
MUST_TIMES = 3.0
STEPS, QUICK_STEPS = 5, 2
BLOCKS, FULL_BLOCKS = 32, 18
"""3.29 GB of weights on the disk; 3.24 GB of states and weights."""
STATE_BYTES = 14
"""Of a parameter: fp32 weight, two fp32 moments, bf16 weight."""
ADAPTERS, RANK, TARGETS, TOKENS, SLOTS = 4, 8, ("q_proj", "v_proj"), 64, 3
FULL_TOKENS, LARGEST_TOKENS = 256, 512
MOST, QUICK_MOST = 48, 4
"""Blocks of the largest model that is tried: 617 million parameters, 9.9 GB with everything in memory."""
PATIENCE = 120.0
"""Seconds for a model to load and train a step; beyond them it only moves pages to and fro."""
CONTENDERS: Mapping[str, Mapping[str, str]] = {
    "all in memory": {"placement": "device", "states": "device", "activations": "keep"},
    "recomputed": {"placement": "device", "states": "device", "activations": "recompute"},
    "recomputed, states on disk": {"placement": "device", "states": "disk", "activations": "recompute"},
    "recomputed, states and weights on disk": {
        "placement": "disk",
        "states": "disk",
        "activations": "recompute",
    },
    "swapped, states and weights on disk": {"placement": "disk", "states": "disk", "activations": "swap"},
}


def capacity(options: argparse.Namespace) -> Found:
    """Trains four adapters with the base in memory and no limit, and then on disk under the limit."""
    shape = QUICK_SHAPE if options.quick else replace(SHAPE, layers=BLOCKS)
    size = write_base(options.folder, shape)
    job = {
        "slots": SLOTS,
        "checkpointing": True,
        "adapters": ADAPTERS,
        "rank": RANK,
        "targets": TARGETS,
        "tokens": TOKENS,
        "threads": options.threads,
    }
    lines = [
        f"{sizes_of(shape)} of {size / 1e9:.2f} GB bf16, {SLOTS} slots; {ADAPTERS} adapters of rank "
        f"{RANK} on "
        f"{', '.join(TARGETS)}, {TOKENS} tokens each, blocks recomputed, {options.threads} threads"
    ]
    data = {"shape": shape.options, "base_bytes": size, **job}
    return _compared(
        options, job, "together", {"placement": "device"}, {"placement": "disk"}, size, data, lines
    )


def full(options: argparse.Namespace) -> Found:
    """Trains all weights in memory without a limit, and then with weights and states on disk under it."""
    shape = QUICK_FULL if options.quick else replace(FULL_SHAPE, layers=FULL_BLOCKS)
    write_base(options.folder, shape)
    parameters = parameters_in_blocks(shape)
    job = {"tokens": FULL_TOKENS, "threads": cores(), "activations": "recompute"}
    lines = [
        f"full tuning, {sizes_of(shape)} of {parameters / 1e6:.0f} million parameters with "
        f"{STATE_BYTES} bytes "
        f"each (fp32 states, bf16 weight) on disk; {FULL_TOKENS} tokens, blocks recomputed, {cores()} threads"
    ]
    free, held = ({"placement": place, "states": place} for place in ("device", "disk"))
    data = {"shape": shape.options, "parameters": parameters, **job}
    return _compared(options, job, "full", free, held, STATE_BYTES * parameters, data, lines)


def _compared(
    options: argparse.Namespace,
    job: dict[str, Any],
    way: str,
    free: dict[str, str],
    held: dict[str, str],
    size: int,
    data: dict[str, Any],
    lines: list[str],
) -> Found:
    """Trains steps `free` of a limit and `held` under it; full tuning writes its model at the end."""
    steps = QUICK_STEPS if options.quick else STEPS
    job |= {"base": str(options.folder)}
    with ours(job | free | {"base_gemm": None}, options.folder, "unlimited") as unlimited:
        expected = [unlimited.train(way) for _ in range(steps)]
        gemm = unlimited.ready["base_gemm"]
    with ours(job | held | {"base_gemm": gemm}, options.folder, "limited", limit=LIMIT) as limited:
        loaded = limited.usage()
        found = [limited.train(way) for _ in range(steps)]
        if way == "full":
            found[-1]["peak"] = limited.train("save")["peak"]
        usage = limited.usage()
    equal = [one["losses"] for one in found] == [one["losses"] for one in expected]
    mib = {name: f"{size / 2**20:.0f} MiB" for name, size in asdict(usage).items()}
    lines += [
        f"limit of the memory cgroup {mib['limit']}; peak {mib['peak']}, page cache included "
        f"({loaded.peak / 2**20:.0f} MiB when it had loaded); resident at most "
        f"{found[-1]['peak'] / 2**20:.0f} MiB, without a limit {expected[-1]['peak'] / 2**20:.0f} MiB",
        f"charges that met the limit: {usage.failed}; killed processes: {usage.killed}",
        f"losses of {steps} steps are {'equal to the last bit to' if equal else 'DIFFERENT from'} "
        "those in memory",
    ]
    must = [
        Target("bytes on disk / limit", size / usage.limit, least=MUST_TIMES),
        Target("charges that met the limit", usage.failed, most=0),
        Target("losses equal to those without a limit (1 = yes)", float(equal), least=1),
    ]
    data |= {"after_loading": asdict(loaded), "usage": asdict(usage), "unlimited": expected, "limited": found}
    return Found(data | {"equal": equal}, lines, must)


class Tried:
    """Which models of a contender trained a step, by the number of blocks."""

    def __init__(self, folder: Path, shape: ModelShape, how: Mapping[str, str]) -> None:
        self.found: dict[int, dict[str, Any]] = {}
        self._folder, self._shape, self._how = folder, shape, how

    def trains(self, blocks: int) -> bool:
        """Whether a model of so many blocks trains a step within the limit."""
        if blocks not in self.found:
            base = str(first_blocks(self._folder, blocks))
            job = {"base": base, "tokens": LARGEST_TOKENS, "threads": cores(), **self._how}
            try:
                self.found[blocks] = train_once(job, self._folder)
            except RemoteError as error:
                if not error.killed:
                    raise
                self.found[blocks] = {"failed": str(error)}
        return "failed" not in self.found[blocks]

    def largest(self, known: int) -> int:
        """Returns the most blocks that train, up to those of `shape`; 0 if not even one does.

        Args:
            known: blocks that another contender, which takes as much memory or more, has trained.
        """
        most = self._shape.layers
        if self._how["placement"] == "disk" and self.trains(most):
            return most
        low, high = 0, max(1, known)
        while high < most and self.trains(high):
            low, high = high, min(most, 2 * high)
        if high == most and self.trains(most):
            return most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.trains(middle) else (low, middle)
        return low


def train_once(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Trains one step of all weights under the limit; returns its seconds and the peak."""
    with ours(job, folder, "largest", limit=LIMIT, patience=PATIENCE) as process:
        return {"seconds": process.train("full")["seconds"], "peak": process.usage().peak}


def first_blocks(folder: Path, blocks: int) -> Path:
    """Returns a folder with the model that has the first blocks of another one; files are linked."""
    new = folder / f"first-{blocks}"
    if new.exists():
        return new
    new.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(config | {"num_hidden_layers": blocks}))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    kept = {
        name: file
        for name, file in index["weight_map"].items()
        if ".layers." not in name or int(name.partition(".layers.")[2].partition(".")[0]) < blocks
    }
    for file in set(kept.values()):
        (new / file).symlink_to(folder / file)
    (new / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": kept}))
    return new


def largest(options: argparse.Namespace) -> Found:
    """Looks for the largest model of each contender (LoHan, Fig. 6)."""
    small, large = (
        replace(QUICK_FULL, layers=QUICK_MOST),
        replace(FULL_SHAPE, layers=MOST),
    )
    shape = small if options.quick else large
    write_base(options.folder, shape)
    rows: dict[str, dict[str, Any]] = {}
    known = shape.layers if options.quick else 0
    for name, how in CONTENDERS.items():
        tried = Tried(options.folder, shape, how)
        known = tried.largest(known)
        parameters = parameters_in_blocks(replace(shape, layers=known))
        least = max(1, next(iter(rows.values()))["parameters"] if rows else parameters)
        rows[name] = {
            "blocks": known,
            "parameters": parameters,
            "times": parameters / least,
            "more": known == shape.layers,
            "tried": tried.found,
            **tried.found.get(known, {}),
        }
    columns = (
        ("blocks", "blocks", "6.0f", 1.0),
        ("million", "parameters", "8.0f", 1e-6),
        ("times", "times", "6.1f", 1.0),
        ("peak MiB", "peak", "8.0f", 2.0**-20),
        ("step s", "seconds", "7.1f", 1.0),
    )
    lines = [
        f"full tuning of a Llama {shape.hidden}/{shape.intermediate}: the most blocks with which a "
        "process in a "
        f"memory cgroup of {LIMIT >> 20} MiB trained a step; {LARGEST_TOKENS} tokens, {cores()} threads",
        *table({("at least: " if row["more"] else "") + name: row for name, row in rows.items()}, columns),
        f"`at least`: {shape.layers} blocks are the most that were tried; `times`: of the parameters of the "
        "first row; `peak` has the page cache in it, which the kernel may take back",
    ]
    data = {
        "shape": asdict(shape),
        "limit": LIMIT,
        "tokens": LARGEST_TOKENS,
        "threads": cores(),
        "rows": rows,
    }
    return Found(data, lines)
