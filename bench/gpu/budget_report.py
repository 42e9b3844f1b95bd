"""The computed cost of the `cuda` backend's launches on an H200, from shapes and from the compiled code.

    python -m bench gpu-budget                     # of the library that was built, for sm_90a
    python -m bench gpu-budget --out gpu-budget    # also writes results/gpu-budget.txt

No GPU is needed, and nothing is measured: `bench/gpu/budget.py` says what is assumed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shared import machine
from shared.results import RESULTS

from gpu import budget
from gpu.instructions import Template, code_of, per_element
from mlora_ext.library import LIBRARY

ARCHITECTURE = "sm_90a"
RANKS = {"4 of rank 16": (16,) * 4, "8, 16, 32, 64": (8, 16, 32, 64)}
MODES = {"drawn": (True, False), "saved": (True, True), "no dropout": (False, False)}


@cache
def _instructions(kernel: str, panel: int, others: tuple[int, ...], gradient: bool) -> float:
    template = Template(kernel, panel, others)
    compiled = Template(kernel, panel) if kernel == "read_dy_once" else template
    return per_element(code_of(LIBRARY, ARCHITECTURE)[compiled], template, gradient=gradient)


def launches(rows: int, ranks: str, mode: str, model: str, own: bool) -> Iterator[str]:
    """Yields a line of each launch of one decoder layer."""
    how = budget.own_costs if own else budget.costs
    dropout, saves = MODES[mode]
    calls = budget.calls_of(model, rows, RANKS[ranks], dropout=dropout, saves_masks=saves)
    products = "own" if own else "cuBLAS's"
    yield f"{model}, {rows} rows, adapters {ranks}, masks {mode}, {products} products"
    yield f"  {'layers':24} {'launch':14} {'MB':>8} {'instructions':>13} {'µs':>7}  bound by"
    for call in calls:
        shape = f"{call.d_in} -> {' '.join(map(str, call.d_outs))}"
        for cost in how(call, _instructions):
            by_bytes = cost.instructions is None or cost.seconds <= cost.bytes / budget.BANDWIDTH + budget.GAP
            count = "" if cost.instructions is None else f"{cost.instructions:.2f}"
            yield (
                f"  {shape:24} {cost.name:14} {cost.bytes / 1e6:8.1f} {count:>13} {1e6 * cost.seconds:7.1f}  "
                f"{'bytes' if by_bytes else 'instructions'}"
            )
    frozen = sum(call.frozen for call in calls)
    yield f"  frozen {1e6 * frozen:.0f} µs, ratio {budget.ratio(calls, _instructions, own=own):.3f}"


def mixtures() -> Iterator[str]:
    """Yields what ranks that differ cost: the launches of a batch of all, to the mean of a batch of each."""
    ranks = (8, 16, 32, 64)
    yield "adapters of ranks 8, 16, 32, 64 in one batch: time of the launches, to the mean of four batches"
    yield "of one rank each"
    for model in budget.MODELS:
        for mode, (dropout, saves) in MODES.items():

            def launches_of(some: tuple[int, ...], model=model, dropout=dropout, saves=saves) -> float:  # type: ignore[no-untyped-def]
                calls = budget.calls_of(model, 8192, some, dropout=dropout, saves_masks=saves)
                return sum(budget.seconds(budget.costs(call, _instructions)) for call in calls)

            equal = sum(launches_of((rank,) * 4) for rank in ranks) / len(ranks)
            yield f"  {model:12} {mode:11} {launches_of(ranks) / equal:6.3f}"


def ratios() -> Iterator[str]:
    """Yields the table of ratios to the frozen layers."""
    yield (
        f"{'model':12} {'rows':>5} {'adapters':14} {'masks':11} {'cublas':>6} {'own':>6} {'PEFT':>6} "
        f"{'LoRAFusion':>11} {'limit':>6}"
    )
    for model in budget.MODELS:
        for rows in (8192, 2048):
            for ranks in RANKS:
                for mode, (dropout, saves) in MODES.items():
                    calls = budget.calls_of(model, rows, RANKS[ranks], dropout=dropout, saves_masks=saves)
                    others = budget.peers(calls)
                    ours = budget.ratio(calls, _instructions)
                    own = budget.ratio(calls, _instructions, own=True)
                    yield (
                        f"{model:12} {rows:5} {ranks:14} {mode:11} {ours:6.3f} {own:6.3f} "
                        f"{others['PEFT']:6.3f} {others['LoRAFusion']:11.3f} {others['limit']:6.3f}"
                    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="name in results/")
    arguments = parser.parse_args()
    lines = [
        f"computed for {ARCHITECTURE}, commit {machine.describe()['commit']}; nothing here ran on a GPU",
        "",
    ]
    try:
        for mode in MODES:
            for own in (False, True):
                lines += [*launches(8192, "4 of rank 16", mode, "Llama-2-7B", own), ""]
        lines += [*mixtures(), "", "frozen products by cuBLAS, or own ones of the same speed", *ratios()]
    except (OSError, RuntimeError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print("\n".join(lines))
    if arguments.out:
        (RESULTS / Path(arguments.out).name).with_suffix(".txt").write_text("\n".join(lines) + "\n")
