"""Time of every launch of layers with adapters, on the GPU that is there, by PyTorch's profiler.

    python -m bench gpu-launches
    python -m bench gpu-launches --library .gpu/variants/base/mlora_ext/libmlora_ops.so --json launches.jsonl
    python -m bench gpu-launches --dry      # tiny sizes on a CPU: tries the script, shows nothing

A case is one layer, or several that share x in one call; a row is a kernel: the median of its microseconds in
a forward and backward pass, and its launches there. Rows, weights and gradients are bf16, adapters fp32 or
bf16. The L2 cache is flushed before each pass. Beside them stand the whole pass and the frozen products, by
events, in turns. The last lines compare mixed ranks with the mean of equal ones: the same sum of tiles and
ranks. `python -m bench gpu-budget` says what the launches should take.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shared import machine
from shared.counting import LAUNCHED, trace_events
from shared.harness import documented_parser
from shared.results import RESULTS
from shared.timing import take_turns
from torch.profiler import ProfilerActivity, profile

MIXED = (8, 16, 32, 64)
PASSES = 10


class Case(NamedTuple):
    """Layers that share x.

    Attributes:
        d_in, d_outs: D, and O of each layer.
        ranks: of the adapters, which have equally many rows.
        p: dropout.
        adapters: their dtype.
    """

    d_in: int
    d_outs: tuple[int, ...]
    ranks: tuple[int, ...]
    p: float = 0.1
    adapters: str = "fp32"

    def __str__(self) -> str:
        ranks, widths = ("/".join(map(str, dict.fromkeys(v))) for v in (self.ranks, self.d_outs))
        adapters = f"{len(self.ranks)} {self.adapters} adapters of ranks {ranks}"
        return f"{self.d_in} -> {len(self.d_outs)} x {widths}, {adapters}, dropout {self.p}"


CASES = [
    Case(4096, (4096,), (16,) * 4),
    Case(4096, (4096,), (16,) * 4, p=0.0),
    Case(4096, (4096,), (16,) * 4, adapters="bf16"),
    Case(4096, (4096,), (64,) * 4),
    Case(4096, (11008,), (16,) * 4),
    Case(11008, (4096,), (16,) * 4),
    Case(4096, (4096,) * 3, MIXED * 2, adapters="bf16"),
    Case(4096, (11008,) * 2, MIXED * 2, adapters="bf16"),
]
EQUAL_SUMS = [
    Case(4096, (4096,), ranks, adapters=adapters)
    for adapters in ("fp32", "bf16")
    for ranks in (MIXED * 4, *((rank,) * 16 for rank in MIXED))
]
"""For each dtype mixed ranks, then those whose mean they are."""


def kernels(run: Callable[[], object], device: str) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of one pass by kernel, those that take longest first.

    On a CPU, which launches nothing, the operators of this library stand in.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints two lines per use
    flush = torch.empty(512 * 2**20 if device == "cuda" else 1, dtype=torch.int8, device=device)
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    for _ in range(3):
        run()
    with profile(activities=[activity]) as seen:
        for _ in range(PASSES):
            flush.bitwise_not_()
            run()
        if device == "cuda":
            torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in sorted(trace_events(seen), key=lambda event: event.get("ts", 0)):
        name = event.get("name", "")
        launched = event.get("cat") in LAUNCHED if device == "cuda" else name.startswith("mlora_ext::")
        if launched and "bitwise_not" not in name:
            found.setdefault(name, []).append(event["dur"])
    passes = {name: (_median_pass(times), round(len(times) / PASSES)) for name, times in found.items()}
    return dict(sorted(passes.items(), key=lambda item: -item[1][0]))


def _median_pass(times: Sequence[float]) -> float:
    """Median over the passes of the sum of a kernel's launches in each."""
    each = max(1, len(times) // PASSES)
    return statistics.median(sum(times[i : i + each]) for i in range(0, len(times), each))


def short(name: str) -> str:
    """A kernel's name without namespaces and arguments."""
    return re.sub(r"mlora(_ext|::cuda)::|\(anonymous namespace\)::|^void |\(.*", "", name)


def measure(case: Case, rows: int, device: str) -> dict[str, Any]:
    """The result of one case."""
    from linear.contenders import (
        Layer,
        frozen_fused,
        ours_fused,
        sharing,
    )  # of the package that --library chose

    lengths = [rows // len(case.ranks)] * len(case.ranks)
    sizes = [(case.d_in, d_out, torch.bfloat16, case.p, device) for d_out in case.d_outs]
    layers = [Layer.random(lengths, case.ranks, *each) for each in sizes]
    if case.adapters == "fp32":
        layers = [layer.with_fp32_adapters() for layer in layers]
    layers = sharing(layers)
    run, products = ours_fused(layers, "cuda" if device == "cuda" else "cpu"), frozen_fused(layers)
    timed = take_turns({"pass": run, "frozen": products}, lambda: None, 10, device=device)
    found = kernels(run, device)
    return {
        "case": str(case),
        "kernels": {short(name): each for name, each in found.items()},
        "ours_us": sum(us for name, (us, _) in found.items() if "mlora" in name),
        **{f"{name}_us": 1e6 * timing.seconds for name, timing in timed.items()},
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yields a result as text."""
    yield f"{result['case']}: µs x launches of a pass"
    for name, (us, launches) in result["kernels"].items():
        yield f"  {us:8.1f} x {launches:2d}  {name[:90]}"
    yield (
        f"  our launches {result['ours_us']:.1f}; the pass {result['pass_us']:.1f}, "
        f"frozen products {result['frozen_us']:.1f}, ratio {result['pass_us'] / result['frozen_us']:.3f}"
    )


def compared(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields what mixed ranks take over the mean of equal ones, of `EQUAL_SUMS`."""
    for i in range(0, len(results), 1 + len(MIXED)):
        mixed, *equal = (result["ours_us"] for result in results[i : i + 1 + len(MIXED)])
        adapters = EQUAL_SUMS[i].adapters
        yield f"mixed ranks over the mean of equal ones, {adapters}: {mixed / statistics.mean(equal):.3f}"


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="of a batch, over all adapters")
    parser.add_argument("--library", type=Path, help="of another build, in its package's folder")
    parser.add_argument(
        "--base-gemm", choices=["cublas", "mlora", "fastest"], help="who multiplies by frozen weights"
    )
    parser.add_argument("--json", type=Path, help="file to which each case's result is added")
    parser.add_argument("--out", help="name in results/")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    arguments = parser.parse_args()
    device, rows = ("cpu", 64) if arguments.dry else ("cuda", arguments.rows)
    if not arguments.dry and not torch.cuda.is_available():
        parser.exit(1, f"{parser.prog}: this torch sees no CUDA device\n")
    if arguments.library:
        sys.path.insert(0, str(arguments.library.resolve().parents[1]))
    import mlora_ext as mx
    from mlora_ext.library import LIBRARY

    if arguments.library and not LIBRARY.samefile(arguments.library):
        parser.exit(1, f"{parser.prog}: --library: expected {LIBRARY.name} in the folder of its package\n")
    if arguments.base_gemm and not arguments.dry:
        mx.use_gpu_base_gemm(arguments.base_gemm)
    about = ", ".join(f"{key} {value}" for key, value in machine.describe().items())
    text = [about, f"library {LIBRARY}, frozen products by {arguments.base_gemm or 'cublas'}", ""]
    print("\n".join(text), flush=True)
    results = []
    for case in [*CASES, *EQUAL_SUMS]:
        if arguments.dry:
            case = case._replace(d_in=case.d_in // 64, d_outs=tuple(d_out // 64 for d_out in case.d_outs))
        results.append(measure(case, rows, device))
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({"library": str(LIBRARY), **results[-1]}) + "\n")
        text += [*lines(results[-1]), ""]
        print("\n".join([*lines(results[-1]), ""]), flush=True)
    total = sum(result["ours_us"] for result in results)
    text += [*compared(results[len(CASES) :]), f"all cases: our launches {total:.1f} µs"]
    print("\n".join(text[-3:]), flush=True)
    if arguments.out:
        (RESULTS / Path(arguments.out).name).with_suffix(".txt").write_text("\n".join(text))
