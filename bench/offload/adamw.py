"""Part `adamw`: our AdamW in one pass against PyTorch's fused one and a copy to bf16."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.options import Options
from offload.report import SECONDS, Data, at_most, table
from offload.turns import medians, ratios, take_turns

PARAMETERS, QUICK_PARAMETERS = 100_000_000, 100_000
LEARNING_RATE, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
ALLOWED = 1e-6  # difference of parameters after an update
MUST, GOAL = 1.0, 0.75
OURS = {torch.float32: "ours, fp32 gradient", torch.bfloat16: "ours, bf16 gradient"}
PEER, PEER_CAST = "torch fused + copy, fp32 gradient", "cast + torch fused + copy, bf16 gradient"


class Ours:
    """States in fp32 and a bf16 copy, updated by one call."""

    def __init__(self, start: Tensor) -> None:
        self.parameter, self.copy = start.clone(), start.bfloat16()
        self.first, self.second = torch.zeros_like(start), torch.zeros_like(start)
        self.steps = 0

    def update(self, gradient: Tensor) -> None:
        self.steps += 1
        options = (LEARNING_RATE, *BETAS, EPS, DECAY, self.steps, 1.0, False, 0)
        tensors = (gradient, self.parameter, self.first, self.second, self.copy)
        torch.ops.mlora_ext.adamw(*([one] for one in tensors), *options)


class Peer:
    """`torch.optim.AdamW(fused=True)`, and a copy to bf16; it takes an fp32 gradient only."""

    def __init__(self, start: Tensor) -> None:
        self.parameter, self.copy = torch.nn.Parameter(start.clone()), start.bfloat16()
        self.parameter.grad = torch.zeros_like(start)
        self._optimizer = torch.optim.AdamW(
            [self.parameter], LEARNING_RATE, BETAS, EPS, weight_decay=DECAY, fused=True
        )

    @torch.no_grad()
    def update(self) -> None:
        self._optimizer.step()
        self.copy.copy_(self.parameter)

    def cast_and_update(self, gradient: Tensor) -> None:
        assert self.parameter.grad is not None
        self.parameter.grad.copy_(gradient)
        self.update()


def run(options: Options) -> dict[str, Any]:
    """Times updates of the same parameters, on one thread and on all cores."""
    count = QUICK_PARAMETERS if options.quick else PARAMETERS
    torch.manual_seed(0)
    start, gradient = torch.randn(count), torch.randn(count)
    gradients = {dtype: gradient.to(dtype) for dtype in OURS}
    ours, peer = Ours(start), Peer(start)
    difference = _difference(ours, peer, gradients[torch.bfloat16])
    if not difference <= ALLOWED:
        raise RuntimeError(f"adamw: parameters differ from torch's by {difference:.1e} after an update")
    cases: dict[str, Callable[[], object]] = {
        PEER: peer.update,
        OURS[torch.float32]: lambda: ours.update(gradients[torch.float32]),
        PEER_CAST: lambda: peer.cast_and_update(gradients[torch.bfloat16]),
        OURS[torch.bfloat16]: lambda: ours.update(gradients[torch.bfloat16]),
    }
    sections = {}
    for threads in sorted({1, options.threads}):
        torch.set_num_threads(threads)
        turns = take_turns(cases, options.turns, warm_up=2)
        found = {name: statistics.median(ratios(turns, name, PEER)) for name in cases}
        sections[str(threads)] = {"turns": turns, "medians": medians(turns), "of_peer": found}
    data = {"parameters": count, "difference": difference, "threads": sections}
    return data | {"must": _must(sections)}


def _difference(ours: Ours, peer: Peer, gradient: Tensor) -> float:
    """Returns the largest difference of any parameter after one update of both."""
    ours.update(gradient)
    peer.cast_and_update(gradient)
    return float((ours.parameter - peer.parameter.detach()).abs().max())


def _must(sections: Data) -> list[dict[str, Any]]:
    return [
        at_most(f"{name} / {PEER}, {threads} threads (goal {GOAL})", section["of_peer"][name], MUST)
        for threads, section in sections.items()
        for name in OURS.values()
    ]


def text(data: Data) -> list[str]:
    """Returns a table for each number of threads."""
    lines = [f"{data['parameters'] / 1e6:g} million parameters; `of peer` is the ratio to `{PEER}`"]
    for threads, section in data["threads"].items():
        rows = {name: row | {"of_peer": section["of_peer"][name]} for name, row in section["medians"].items()}
        lines += ["", f"threads: {threads}", *table(rows, (*SECONDS, ("of peer", "of_peer", "7.3f", 1)))]
    return lines
