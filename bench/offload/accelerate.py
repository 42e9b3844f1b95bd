"""Part `accelerate`: what a user would pick instead, under the same limit on memory."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from shared.harness import Found, table
from shared.timing import Turn, in_order, medians, ratio

from offload.base import QUICK_SHAPE, SHAPE, drop_cached, sizes_of, write_base
from offload.contenders import random_batch
from offload.remote import PEER, Remote, RemoteError, ours

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


def run(options: argparse.Namespace) -> Found:
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
    more = {"placement": "disk", "slots": SLOTS, "tokens": TOKENS, "base_gemm": None}
    not_run: dict[str, str] = {}
    with ExitStack() as stack:
        remotes = {"ours": stack.enter_context(ours(job | more, options.folder, "ours", limit=LIMIT))}
        start = partial(_peer, stack, options.folder, not_run)
        for name, library, python, limits in (
            (ACCELERATE, "accelerate", sys.executable, [LIMIT]),
            (DEEPSPEED, "deepspeed", options.deepspeed, [LIMIT, 3 * LIMIT]),
        ):
            if python is None:
                not_run[name] = f"give --{library} PYTHON, an interpreter that has it"
                continue
            # DeepSpeed's prefetching fails where blocks are recomputed; killed at the limit, it gets more
            own = {"library": library, "port": _free_port(), "checkpointing": library == "accelerate"}
            found = next(
                filter(None, (start(name, job | rows | own, python, limit) for limit in limits)), None
            )
            remotes |= {} if found is None else {name: found}
        turns = _turns(remotes, options, not_run)
        libraries = {
            name: {"usage": asdict(one.usage()), "versions": one.ready.get("versions")}
            for name, one in remotes.items()
        }
    tokens, shown = ADAPTERS * TOKENS, medians(turns)
    for name, row in shown.items():
        row["rate"] = tokens / row["seconds"]
        row["ratio"] = ratio(turns, name, BEST if name.endswith("1 adapter") else PACKED)
    columns = (
        ("s", "seconds", "8.2f", 1.0),
        ("tokens/s", "rate", "8.1f", 1.0),
        ("ours is", "ratio", "8.2f", 1.0),
    )
    lines = [
        f"{sizes_of(shape)} of {size / 1e9:.2f} GB bf16 under a limit of {LIMIT >> 20} MiB; rank {RANK} on "
        f"{', '.join(TARGETS)}, {ADAPTERS} sequences of {TOKENS} tokens, blocks recomputed (not by "
        "DeepSpeed), "
        f"{options.threads} threads",
        f"`ours is` so many times as fast: {BEST} where one adapter has all sequences, else {PACKED}",
        *table(shown, columns),
    ]
    for name, one in libraries.items():
        usage, versions = one["usage"], one["versions"] or {}
        lines.append(
            f"{name}: peak {usage['peak'] >> 20} of {usage['limit'] >> 20} MiB, charges that met the limit: "
            f"{usage['failed']} {' '.join(f'{library} {number}' for library, number in versions.items())}"
        )
    lines += [f"not run: {name}: {reason}" for name, reason in not_run.items()]
    data = {"shape": shape.options, "base_bytes": size, "limit": LIMIT, **job, "tokens": TOKENS}
    return Found(data | {"libraries": libraries, "not_run": not_run, "turns": turns}, lines)


def _peer(
    stack: ExitStack,
    folder: Path,
    not_run: dict[str, str],
    name: str,
    job: dict[str, Any],
    python: str,
    limit: int,
) -> Remote | None:
    """Starts another library's process, which lives as long as the stack; `not_run` says why it failed."""
    scratch = folder / job["library"]
    scratch.mkdir(exist_ok=True)
    try:
        remote = Remote(
            [python, PEER], job | {"scratch": str(scratch)}, folder / f"{scratch.name}.log", limit=limit
        )
    except RemoteError as error:
        not_run[f"{name}, {limit >> 20} MiB"] = str(error)
        return None
    return stack.enter_context(remote)


def _turns(remotes: dict[str, Remote], options: argparse.Namespace, not_run: dict[str, str]) -> list[Turn]:
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
