"""Part `largest`: the largest model that trains within a limit on memory (LoHan, Fig. 6)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shared.shapes import ModelShape

from offload.base import write_base
from offload.full_model import QUICK_SHAPE, SHAPE, parameters_in_blocks
from offload.full_process import FullError, train_full
from offload.options import Options
from offload.report import Data, table
from offload.turns import cores

LIMIT = 1 << 30
TOKENS = 512
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


class Tried:
    """Which models of a contender trained a step, by the number of blocks.

    Args:
        folder: of the model with the most blocks.
        shape: of it.
        how: the contender's placements.
    """

    def __init__(self, folder: Path, shape: ModelShape, how: Mapping[str, str]) -> None:
        self.found: dict[int, dict[str, Any]] = {}
        self._folder, self._shape, self._how = folder, shape, how

    def trains(self, blocks: int) -> bool:
        """Whether a model of so many blocks trains a step within the limit."""
        if blocks not in self.found:
            job = {
                "base": str(first_blocks(self._folder, self._shape, blocks)),
                "tokens": TOKENS,
                "steps": 1,
                "threads": cores(),
                **self._how,
            }
            try:
                done = train_full(job, LIMIT, PATIENCE)
                found = {"seconds": done["seconds"][0], "peak": done["usage"]["peak"]}
            except FullError as error:
                if not error.killed:
                    raise
                found = {"failed": str(error)}
            self.found[blocks] = found
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


def first_blocks(folder: Path, shape: ModelShape, blocks: int) -> Path:
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


def run(options: Options) -> dict[str, Any]:
    """Looks for the largest model of each contender.

    Raises:
        OSError: no memory cgroup can be made.
        RemoteError: a process failed for another reason than its limit.
    """
    small, large = replace(QUICK_SHAPE, layers=QUICK_MOST), replace(SHAPE, layers=MOST)
    shape = small if options.quick else large
    write_base(options.folder, shape)
    rows: dict[str, dict[str, Any]] = {}
    known = shape.layers if options.quick else 0
    for name, how in CONTENDERS.items():
        tried = Tried(options.folder, shape, how)
        known = tried.largest(known)
        rows[name] = {
            "blocks": known,
            "parameters": parameters_in_blocks(replace(shape, layers=known)),
            "more": known == shape.layers,
            "tried": tried.found,
            **tried.found.get(known, {}),
        }
    return {
        "shape": asdict(shape),
        "limit": LIMIT,
        "tokens": TOKENS,
        "threads": cores(),
        "rows": rows,
        "must": [],
    }


def text(data: Data) -> list[str]:
    """Returns a table of the largest models."""
    shape, rows = data["shape"], data["rows"]
    least = max(1, next(iter(rows.values()))["parameters"])
    shown = {
        ("at least: " if row["more"] else "") + name: row | {"times": row["parameters"] / least}
        for name, row in rows.items()
    }
    columns = (
        ("blocks", "blocks", "6.0f", 1.0),
        ("million", "parameters", "8.0f", 1e-6),
        ("times", "times", "6.1f", 1.0),
        ("peak MiB", "peak", "8.0f", 2.0**-20),
        ("step s", "seconds", "7.1f", 1.0),
    )
    return [
        f"full tuning of a Llama {shape['hidden']}/{shape['intermediate']}: the most blocks with which a "
        f"process in a memory cgroup of {data['limit'] / 2**20:.0f} MiB trained a step; {data['tokens']} "
        f"tokens, {data['threads']} threads",
        *table(shown, columns),
        f"`at least`: {shape['layers']} blocks are the most that were tried; `times`: of the "
        "parameters of the first row; `peak` has the page cache in it, which the kernel may take back",
    ]
