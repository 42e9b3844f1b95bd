"""Is a step captured as a CUDA graph the eager one, to the bit, and how long does each take?

    python -m bench gpu-graph
    python -m bench gpu-graph --dry      # tiny, on a CPU, which captures nothing: tries the script

A step is forward and backward of the seven linear layers of Llama-2-7B, those that share x in one call, and
`B += rate * dB`, `A += rate * dA` in place. Dropout is off: the library refuses to capture it. Both ways go
five steps from the same adapters. Exits with 1 where any number differs in a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from linear.contenders import Layer, ours_fused, sharing
from linear.layouts import balanced, mixed_ranks
from shared.harness import documented_parser
from shared.shapes import MODELS, SHARE_X
from shared.timing import take_turns
from torch import Tensor

STEPS, RATE, ADAPTERS = 5, 1e-3, 8


def block(model: str, rows: int, dtype: torch.dtype, device: str) -> list[list[Layer]]:
    """Random layers of a decoder layer with fp32 adapters; those of a group share x."""
    sizes, lengths = MODELS[model].seven, balanced(rows, ADAPTERS)
    found = []
    for names in SHARE_X:
        made = [Layer.random(lengths, mixed_ranks(ADAPTERS), *sizes[n], dtype, 0.0, device) for n in names]
        found.append(sharing([layer.with_fp32_adapters() for layer in made]))
    return found


def step_of(groups: list[list[Layer]]) -> tuple[Callable[[], list[Tensor]], list[Tensor]]:
    """A step that returns its results, and the adapters that it changes."""
    runs = [ours_fused(group) for group in groups]
    adapters = [[tensor for layer in group for tensor in layer.interleaved()] for group in groups]

    def step() -> list[Tensor]:
        results = []
        for group, run, own in zip(groups, runs, adapters, strict=True):
            found = run()
            with torch.no_grad():
                torch._foreach_add_(own, found[len(group) + 1 :], alpha=RATE)
            results += found
        return results

    return step, [tensor for own in adapters for tensor in own]


def captured(step: Callable[[], list[Tensor]], device: str) -> tuple[Callable[[], object], list[Tensor]]:
    """A function that replays the step, and the tensors that it writes; a CPU runs it once before."""
    if device == "cpu":
        results = step()

        def again() -> None:
            for old, new in zip(results, step(), strict=True):
                old.detach().copy_(new)

        return again, results
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # tables are uploaded by a first step, which a capture may not do
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def main() -> int:
    """Compares bits, then times; returns the exit code."""
    parser = documented_parser(__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU")
    dry = parser.parse_args().dry
    device, model, rows = ("cpu", "quick", 64) if dry else ("cuda", "llama-2-7b", 8192)
    step, adapters = step_of(block(model, rows, torch.bfloat16, device))
    begin = [tensor.detach().clone() for tensor in adapters]

    def back() -> None:
        with torch.no_grad():
            torch._foreach_copy_(adapters, begin)

    for _ in range(STEPS):
        eager = step()
    after = [tensor.detach().clone() for tensor in (*eager, *adapters)]
    replay, results = captured(step, device)
    back()
    for _ in range(STEPS):
        replay()
    differ = sum(not torch.equal(a, b) for a, b in zip(after, [*results, *adapters], strict=True))
    print(f"captured step: {len(after)} results and adapters after {STEPS} steps, {differ} with other bits")
    timed = take_turns({"eager": step, "captured": replay}, back, 10, device=device)
    eager_ms, captured_ms = (1e3 * timed[name].seconds for name in ("eager", "captured"))
    print(f"captured step: {captured_ms:.3f} ms, eager {eager_ms:.3f} ms, {captured_ms / eager_ms:.3f}")
    return 1 if differ else 0
