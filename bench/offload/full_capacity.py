"""Part `full`: all weights are trained with states of three times the memory that the process may use."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from offload.base import write_base
from offload.full_model import QUICK_SHAPE, SHAPE, parameters_in_blocks
from offload.full_process import train_full
from offload.options import Options
from offload.report import Data, at_least, at_most
from offload.turns import cores

LIMIT = 1 << 30
BLOCKS = 18
"""Of 12.8 million parameters each: 3.24 GB of states and weights on disk."""
STATE_BYTES = 14
"""Of a parameter: fp32 weight, two fp32 moments, bf16 weight."""
MUST_TIMES = 3.0
TOKENS, STEPS, QUICK_STEPS = 256, 5, 2


def run(options: Options) -> dict[str, Any]:
    """Trains in memory without a limit, and then with weights and states on disk under the limit.

    In this order the first process has read the files of the libraries. Their pages are not counted as the
    second one's, as they are not where several processes use them.

    Raises:
        OSError: no memory cgroup can be made.
        RemoteError: a process failed, as one does that is killed at its limit.
    """
    shape = QUICK_SHAPE if options.quick else replace(SHAPE, layers=BLOCKS)
    write_base(options.folder, shape)
    job = {
        "base": str(options.folder),
        "tokens": TOKENS,
        "steps": QUICK_STEPS if options.quick else STEPS,
        "threads": cores(),
        "activations": "recompute",
    }
    unlimited = train_full(job | {"placement": "device", "states": "device"})
    limited = train_full(
        job | {"placement": "disk", "states": "disk", "save": str(options.folder / "trained")}, LIMIT
    )
    usage, parameters = limited["usage"], parameters_in_blocks(shape)
    times, equal = STATE_BYTES * parameters / LIMIT, limited["losses"] == unlimited["losses"]
    return {
        "shape": shape.options,
        "parameters": parameters,
        "python": sys.version.split()[0],
        "tokens": TOKENS,
        "threads": cores(),
        "times": times,
        "unlimited": unlimited,
        "limited": limited,
        "equal": equal,
        "must": [
            at_least("bytes of weights and states in blocks / limit", times, MUST_TIMES),
            at_most("charges that met the limit", usage["failed"], 0),
            at_least("losses equal to those without a limit (1 = yes)", float(equal), 1),
        ],
    }


def text(data: Data) -> list[str]:
    """Returns what was trained, and the memory that it took."""
    shape, limited, unlimited = data["shape"], data["limited"], data["unlimited"]
    usage = limited["usage"]
    equal = "equal to the last bit to" if data["equal"] else "DIFFERENT from"
    return [
        f"full tuning, Llama {shape['hidden_size']}/{shape['intermediate_size']}, "
        f"{shape['num_hidden_layers']} blocks of {data['parameters'] / 1e6:.0f} million parameters with "
        f"{STATE_BYTES} bytes each (fp32 states, bf16 weight) on disk = {data['times']:.2f} times "
        f"the limit; {data['tokens']} tokens, blocks recomputed, {data['threads']} threads",
        f"limit of the memory cgroup {_mib(usage['limit'])}; peak {_mib(usage['peak'])}, page cache included "
        f"(resident: {_mib(limited['loaded'])} when it had loaded, {_mib(limited['peak'])} at most, of which "
        "pages of the libraries may be charged to others)",
        f"without a limit, all in memory: {_mib(unlimited['peak'])} resident at most",
        f"charges that met the limit: {usage['failed']}; killed processes: {usage['killed']}",
        f"after {len(limited['losses'])} steps it wrote the trained model; their losses are {equal} those in "
        "memory without a limit",
    ]


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
