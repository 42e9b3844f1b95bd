"""Part `adamw`: our AdamW in one pass against PyTorch's fused one and a copy to bf16."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from shared.harness import SECONDS, Found, Target, table
from shared.timing import alternate, medians, ratio
from torch import Tensor

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


def run(options: argparse.Namespace) -> Found:
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
    lines = [f"{count / 1e6:g} million parameters; `of peer` is the ratio to `{PEER}`"]
    sections, must = {}, []
    for threads in sorted({1, options.threads}):
        torch.set_num_threads(threads)
        turns = alternate(cases, options.turns, warm_up=2)
        rows = medians(turns)
        for name, row in rows.items():
            row["of_peer"] = ratio(turns, name, PEER)
        sections[str(threads)] = {"turns": turns, "medians": rows}
        lines += ["", f"threads: {threads}", *table(rows, (*SECONDS, ("of peer", "of_peer", "7.3f", 1.0)))]
        for name in OURS.values():
            what = f"{name} / {PEER}, {threads} threads (goal {GOAL})"
            must.append(Target(what, rows[name]["of_peer"], most=MUST))
    return Found({"parameters": count, "difference": difference, "threads": sections}, lines, must)


def _difference(ours: Ours, peer: Peer, gradient: Tensor) -> float:
    """Returns the largest difference of any parameter after one update of both."""
    ours.update(gradient)
    peer.cast_and_update(gradient)
    return float((ours.parameter - peer.parameter.detach()).abs().max())
