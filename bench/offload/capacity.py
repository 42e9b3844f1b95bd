"""Part `capacity`: four adapters over a base of three times the memory that the process may use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from offload.base import QUICK_SHAPE, SHAPE, write_base
from offload.memory_group import Usage
from offload.options import Options
from offload.remote import OURS, Remote
from offload.report import Data, at_least, at_most

LIMIT = 1 << 30
BLOCKS = 32
"""Of 103 MB each: 3.29 GB of weights on the disk."""
MUST_TIMES = 3.0
ADAPTERS, RANK, TARGETS, TOKENS, SLOTS = 4, 8, ("q_proj", "v_proj"), 64, 3
STEPS, QUICK_STEPS = 5, 2


def run(options: Options) -> dict[str, Any]:
    """Trains with the base in memory and no limit, and then on disk under the limit.

    In this order the first process has read the files of the libraries. Their pages are not counted as the
    second one's, as they are not where several processes use them.

    Raises:
        OSError: no memory cgroup can be made.
        RemoteError: a process failed, as one does that is killed at its limit.
    """
    shape = QUICK_SHAPE if options.quick else replace(SHAPE, layers=BLOCKS)
    size = write_base(options.folder, shape)
    steps = QUICK_STEPS if options.quick else STEPS
    job = {
        "base": str(options.folder),
        "slots": SLOTS,
        "checkpointing": True,
        "adapters": ADAPTERS,
        "rank": RANK,
        "targets": TARGETS,
        "tokens": TOKENS,
        "threads": options.threads,
    }
    free = job | {"placement": "device", "base_gemm": None, "limit": None}
    with Remote(OURS, free, options.folder / "unlimited.log") as unlimited:
        expected = [unlimited.train("together")["losses"] for _ in range(steps)]
        gemm = unlimited.ready["base_gemm"]
    on_disk = job | {"placement": "disk", "base_gemm": gemm, "limit": LIMIT}
    with Remote(OURS, on_disk, options.folder / "limited.log", limit=LIMIT) as limited:
        loaded = limited.usage()
        losses = [limited.train("together")["losses"] for _ in range(steps)]
        usage = limited.usage()
    data = {
        "shape": shape.options,
        "base_bytes": size,
        "python": sys.version.split()[0],
        **{name: job[name] for name in ("slots", "adapters", "rank", "targets", "tokens", "threads")},
        "after_loading": asdict(loaded),
        "usage": asdict(usage),
        "losses": losses,
        "equal": losses == expected,
    }
    return data | {"must": _must(data, usage)}


def _must(data: Mapping[str, Any], usage: Usage) -> list[dict[str, Any]]:
    return [
        at_least("bytes of the base / limit", data["base_bytes"] / usage.limit, MUST_TIMES),
        at_most("charges that met the limit", usage.failed, 0),
        at_least("losses equal to those without a limit (1 = yes)", float(data["equal"]), 1),
    ]


def text(data: Data) -> list[str]:
    """Returns what was trained, and the memory that it took."""
    shape, usage = data["shape"], data["usage"]
    limit, peak, loaded = (
        size / 2**20 for size in (usage["limit"], usage["peak"], data["after_loading"]["peak"])
    )
    times = data["base_bytes"] / usage["limit"]
    equal = "equal to the last bit to" if data["equal"] else "DIFFERENT from"
    return [
        f"Llama {shape['hidden_size']}/{shape['intermediate_size']}, {shape['num_hidden_layers']} blocks of "
        f"{data['base_bytes'] / 1e9:.2f} GB bf16 = {times:.2f} times the limit, {data['slots']} slots",
        f"{data['adapters']} adapters of rank {data['rank']} on {', '.join(data['targets'])}, "
        f"{data['tokens']} tokens each, blocks recomputed, {data['threads']} threads",
        f"limit of the memory cgroup {limit:.0f} MiB; peak {peak:.0f} MiB, page cache included "
        f"({loaded:.0f} MiB when it had loaded)",
        f"charges that met the limit: {usage['failed']}; killed processes: {usage['killed']}",
        f"losses of {len(data['losses'])} steps are {equal} those of the base in memory without a limit",
    ]
