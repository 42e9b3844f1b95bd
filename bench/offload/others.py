"""Part `accelerate`: what a user would pick instead, under the same limit on memory."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from offload.base import QUICK_SHAPE, SHAPE, drop_cached, write_base
from offload.contenders import random_batch
from offload.options import Options
from offload.remote import OURS, PEER, Remote, RemoteError
from offload.report import Data, table
from offload.turns import Turn, in_order, medians, ratios

LIMIT = 1 << 30
BLOCKS = 24
"""Of 103 MB each: 2.47 GB, so that the page cache cannot hold them under the limit."""
ADAPTERS, RANK, TARGETS, TOKENS, SLOTS = 4, 8, ("q_proj", "v_proj"), 64, 3
WAYS = {
    "ours": {"together": "4 adapters packed", "apart": "4 adapters in turn", "one": "1 adapter"},
    "accelerate + PEFT": {"apart": "4 adapters in turn", "one": "1 adapter"},
    "DeepSpeed ZeRO-3 + PEFT": {"one": "1 adapter"},
}
ACCELERATE, DEEPSPEED = "accelerate + PEFT", "DeepSpeed ZeRO-3 + PEFT"
PACKED, BEST = "ours, 4 adapters packed", "ours, 1 adapter"
ALLOWED = 0.01
"""Relative difference of first losses: adapters begin with B = 0, so all are the base's losses in bf16."""


def run(options: Options) -> dict[str, Any]:
    """Trains the same sequences by all libraries, in turns.

    Raises:
        OSError: no memory cgroup can be made.
        RemoteError: our own process failed, or a peer computes something else.
    """
    shape = QUICK_SHAPE if options.quick else replace(SHAPE, layers=BLOCKS)
    size = write_base(options.folder, shape)
    job = {
        "base": str(options.folder),
        "checkpointing": True,
        "adapters": ADAPTERS,
        "rank": RANK,
        "targets": TARGETS,
        "threads": options.threads,
    }
    batch = random_batch({f"a{number}": TOKENS for number in range(ADAPTERS)}, shape.vocabulary)
    rows = {"rows": [list(samples[0].input_ids) for samples in batch.values()]}
    more = {"placement": "disk", "slots": SLOTS, "tokens": TOKENS, "base_gemm": None, "limit": LIMIT}
    not_run: dict[str, str] = {}
    with ExitStack() as stack:
        start = partial(_started, stack, options.folder)
        remotes = {"ours": start(OURS, "ours", job | more)}
        remotes |= _peers(start, job | rows, options.deepspeed, not_run)
        turns = _turns(remotes, options, not_run)
        libraries = {
            name: {"usage": asdict(one.usage()), "versions": one.ready.get("versions")}
            for name, one in remotes.items()
        }
    return {
        "shape": shape.options,
        "base_bytes": size,
        "limit": LIMIT,
        **{name: job[name] for name in ("adapters", "rank", "targets", "threads")},
        "tokens": TOKENS,
        "libraries": libraries,
        "not_run": not_run,
        "turns": turns,
        "must": [],
    }


def _peers(
    start: Callable[..., Remote], job: dict[str, Any], deepspeed: str | None, not_run: dict[str, str]
) -> dict[str, Remote]:
    """Starts the other libraries; `not_run` says why one is missing.

    DeepSpeed's prefetching fails where blocks are recomputed. Where it is killed at the limit, it gets more.
    """
    found = {}
    try:
        found[ACCELERATE] = start(PEER, "accelerate", job | {"library": "accelerate"})
    except RemoteError as error:
        not_run[ACCELERATE] = str(error)
    if deepspeed is None:
        not_run[DEEPSPEED] = "give --deepspeed PYTHON, an interpreter that has it"
        return found
    own = {"library": "deepspeed", "port": _free_port(), "checkpointing": False}
    for limit in (LIMIT, 3 * LIMIT):
        try:
            found[DEEPSPEED] = start(PEER, "deepspeed", job | own, limit=limit, python=deepspeed)
            return found
        except RemoteError as error:
            not_run[f"{DEEPSPEED}, {limit >> 20} MiB"] = str(error)
    return found


def _started(
    stack: ExitStack, folder: Path, script: Path, name: str, job: dict[str, Any], **how: Any
) -> Remote:
    """Starts a process that lives as long as the stack, with a folder of its own."""
    scratch = folder / name
    scratch.mkdir(exist_ok=True)
    how.setdefault("limit", LIMIT)
    return stack.enter_context(Remote(script, job | {"scratch": str(scratch)}, folder / f"{name}.log", **how))


def _turns(remotes: dict[str, Remote], options: Options, not_run: dict[str, str]) -> list[Turn]:
    """Returns the turns after one that does not count, in which losses are compared.

    A peer that fails leaves, and `not_run` says why.
    """
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        f"{name}, {label}": partial(remote.train, way)
        for name, remote in remotes.items()
        for way, label in WAYS[name].items()
    }
    found = []
    for turn in range(1 + options.turns):
        taken = {}
        for name in in_order(cases, turn):
            for path in options.folder.glob("*.safetensors"):
                drop_cached(path)
            try:
                taken[name] = cases[name]()
            except RemoteError as error:
                if name.startswith("ours"):
                    raise
                not_run[name] = str(error)
                del cases[name]
        if turn == 0:
            _check_losses({name: sum(one["losses"].values()) for name, one in taken.items()})
        else:
            found.append({name: taken[name] for name in cases})
    return found


def _check_losses(sums: dict[str, float]) -> None:
    """Raises RemoteError if the first losses say that a contender computes something else."""
    for name, value in sums.items():
        if not abs(value - sums[PACKED]) <= ALLOWED * sums[PACKED]:
            raise RemoteError(f"{name}: expected losses of {sums[PACKED]}, as ours, got {value}")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def text(data: Data) -> list[str]:
    """Returns a table of tokens/s, the memory that each library took, and what was not run."""
    shape, turns = data["shape"], data["turns"]
    tokens = data["adapters"] * data["tokens"]
    rows = {}
    for name, row in medians(turns).items():
        base = BEST if name.endswith("1 adapter") else PACKED
        rate = {"rate": tokens / row["seconds"], "ratio": median(ratios(turns, name, base))}
        rows[name] = row | rate
    columns = (
        ("s", "seconds", "8.2f", 1.0),
        ("tokens/s", "rate", "8.1f", 1.0),
        ("ours is", "ratio", "8.2f", 1.0),
    )
    lines = [
        f"Llama {shape['hidden_size']}/{shape['intermediate_size']}, {shape['num_hidden_layers']} blocks of "
        f"{data['base_bytes'] / 1e9:.2f} GB bf16 under a limit of {data['limit'] / 2**20:.0f} MiB; rank "
        f"{data['rank']} on {', '.join(data['targets'])}, {data['adapters']} sequences of {data['tokens']} "
        f"tokens, blocks recomputed (not by DeepSpeed), {data['threads']} threads",
        f"`ours is` so many times as fast: {BEST} where one adapter has all sequences, else {PACKED}",
        *table(rows, columns),
    ]
    for name, one in data["libraries"].items():
        usage = one["usage"]
        versions = ", ".join(f"{library} {number}" for library, number in (one["versions"] or {}).items())
        lines.append(
            f"{name}: peak {usage['peak'] / 2**20:.0f} of {usage['limit'] / 2**20:.0f} MiB, charges that met "
            f"the limit: {usage['failed']}" + (f" ({versions})" if versions else "")
        )
    return [*lines, *(f"not run: {name}: {reason}" for name, reason in data["not_run"].items())]
