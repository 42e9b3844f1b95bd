"""Host time of a layer with adapters, forward and backward, for 1, 8 and 64 adapters.

    python -m bench host                                   # results/host-cpu.{json,txt}
    PYTHONPATH=OTHER/CHECKOUT python -m bench host --out before

A model is a chain of 32 x 7 linear layers of width 64, rank 8, dropout 0.1, on one thread. It is trained as
the engine does it: adapters keep their gradients. Without rows, kernels and products have nothing to do: what
is left is Python, autograd and the calls of the operator. `cpu` is the compiled backend. `cuda` is its code
for the host, built for this CPU, with launches left out; `triton` likewise, with kernels that do nothing: its
own dispatch comes on top. `cpu, 64 rows` does everything. `frozen` is the same model of `nn.Linear`. The rows
`blocks` are of 32 blocks of 7 layers, connected as a Llama's: q, k and v share x, and gate and up do, which
`cuda` computes in one call each.

The rows `own loop` are of a loop of one's own, with forward, backward and `zero_grad()`; `held` of the same
loop after `hold_gradients`. The time of an optimizer is not in it.

Each part has a process of its own. Counts of adapters take turns of five steps, as training repeats one
model's steps; the first of a turn finds the processor's caches full of another model's objects and does not
count. Medians.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from shared.harness import Found, measured, table
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.backends import selection
from mlora_ext.backends.selection import Backend
from mlora_ext.routing.router import router_of

LAYERS, WIDTH, RANK = 32 * 7, 64, 8
COUNTS = (1, 8, 64)
STEPS = 5
"""Of one turn; the first does not count."""
_TRITON = ("shrink", "expand", "read_dy", "read_x", "reduce_rows", "reduce_gradients")


class NoKernel:
    """A Triton kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: None


@contextmanager
def stubbed(name: Backend) -> Iterator[None]:
    """Serves CPU tensors with the host's part of a GPU backend."""
    with ExitStack() as stack:
        if name == "cuda":
            sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cuda"))
            emulated = importlib.import_module("emulated")
            emulated.load()
            stack.enter_context(emulated.without_kernels())
        else:
            operator = importlib.import_module("mlora_ext.backends.triton.operator")
            for kernel in _TRITON:
                stack.enter_context(patch.object(operator, kernel, NoKernel()))
        stack.enter_context(patch.object(selection, "_refusal", lambda name, device: None))
        stack.enter_context(patch.object(selection._choice, "name", name))
        yield


class Chain(nn.Module):
    """Linear layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    """The seven linear layers of a Llama's block, and additions in place of attention and activation."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            self.add_module(f"{name}_proj", nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))
        return self.down_proj(self.gate_proj(x) + self.up_proj(x))  # type: ignore[no-any-return]


def blocks() -> nn.Module:
    """Returns as many layers as a chain has, in blocks."""
    return nn.Sequential(*(Block() for _ in range(LAYERS // 7)))


Make = Callable[[], nn.Module]


class Trained:
    """A model with so many adapters, and one step of it."""

    def __init__(self, adapters: int, rows: int, make: Make = Chain) -> None:
        names = [f"a{i}" for i in range(adapters)]
        config = LoraConfig(r=RANK, lora_dropout=0.1, target_modules="all-linear")
        self.names = names
        self.model = mx.convert_model(make(), dict.fromkeys(names, config)).train()
        router = router_of(self.model)
        router.accumulates = True
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        getattr(router, "moved", int)()
        each = [rows // adapters + (i < rows % adapters) for i in range(adapters)]
        self.layout = mx.SegmentLayout.from_lengths(each)
        self.x, self.dy = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)

    def step(self) -> tuple[float, float]:
        """Returns seconds of forward and of backward."""
        with mx.route(self.model, self.layout, names=self.names):
            return timed(self.model, self.x, self.dy)


class OwnLoop(Trained):
    """The same in a loop of one's own, where autograd adds to gradients, and each step makes them anew."""

    def __init__(self, adapters: int, rows: int, make: Make = Chain) -> None:
        super().__init__(adapters, rows, make)
        router_of(self.model).accumulates = False
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad])
        self.zero: Callable[[], Any] = self.optimizer.zero_grad
        self.zero()

    def step(self) -> tuple[float, float]:
        forward, backward = super().step()
        start = time.perf_counter()
        self.zero()
        return forward, backward + time.perf_counter() - start


class HeldLoop(OwnLoop):
    """The same after `hold_gradients`."""

    def __init__(self, adapters: int, rows: int, make: Make = Chain) -> None:
        super().__init__(adapters, rows, make)
        self.zero = mx.hold_gradients(self.model).zero


class Frozen:
    """The model without adapters, whose input needs a gradient."""

    def __init__(self, rows: int, make: Make = Chain) -> None:
        self.model = make().requires_grad_(False)
        self.x, self.dy = torch.randn(rows, WIDTH, requires_grad=True), torch.randn(rows, WIDTH)

    def step(self) -> tuple[float, float]:
        """Returns seconds of forward and of backward."""
        return timed(self.model, self.x, self.dy)


def timed(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[float, float]:
    """Returns seconds of forward and of backward."""
    start = time.perf_counter()
    y = model(x)
    middle = time.perf_counter()
    y.backward(dy)
    return middle - start, time.perf_counter() - middle


CASES: dict[str, tuple[type[Trained], int, Make, Callable[[], Any]]] = {
    "cpu": (Trained, 0, Chain, nullcontext),
    "cpu, blocks": (Trained, 0, blocks, nullcontext),
    "cuda": (Trained, 0, Chain, partial(stubbed, "cuda")),
    "cuda, blocks": (Trained, 0, blocks, partial(stubbed, "cuda")),
    "triton": (Trained, 0, Chain, partial(stubbed, "triton")),
    "cpu, 64 rows": (Trained, 64, Chain, nullcontext),
    "own loop, cpu": (OwnLoop, 0, Chain, nullcontext),
    "held, cpu": (HeldLoop, 0, Chain, nullcontext),
    "own loop, cpu, 64 rows": (OwnLoop, 64, Chain, nullcontext),
    "held, cpu, 64 rows": (HeldLoop, 64, Chain, nullcontext),
    "own loop, cuda, blocks": (OwnLoop, 0, blocks, partial(stubbed, "cuda")),
    "held, cuda, blocks": (HeldLoop, 0, blocks, partial(stubbed, "cuda")),
}
"""Loop, rows, model and backend."""


def measure(title: str, turns: int) -> dict[str, dict[str, float]]:
    """Returns µs of a layer's forward, backward and both, by the number of adapters and for `frozen`."""
    torch.set_num_threads(1)
    loop, rows, make, around = CASES[title]
    cases: dict[str, Trained | Frozen] = {str(count): loop(count, rows, make) for count in COUNTS}
    cases["frozen"] = Frozen(rows, make)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with around():
        for turn in range(turns + 1):
            for name, case in cases.items():
                seconds = [case.step() for _ in range(STEPS)]
                if turn:
                    found[name] += seconds[1:]
    return {name: _medians(steps) for name, steps in found.items()}


def _medians(turns: list[tuple[float, float]]) -> dict[str, float]:
    forward, backward = zip(*turns, strict=True)
    both = [sum(turn) for turn in turns]
    parts = {"forward": forward, "backward": backward, "both": both}
    return {name: 1e6 * statistics.median(values) / LAYERS for name, values in parts.items()}


def measure_all(options: argparse.Namespace) -> Found:
    """Measures every case in a process of its own: objects of earlier models leave the heap in pieces."""
    results, rows = {}, {}
    for title in list(CASES)[: 1 if options.quick else None]:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            results[title] = process.submit(measure, title, options.turns).result()
        for name, us in results[title].items():
            ratio = None if name == "frozen" else us["both"] / results[title][str(COUNTS[0])]["both"]
            row = us | {"ms": 1e-3 * LAYERS * us["both"], "ratio": ratio}
            rows[f"{title}, {name if name == 'frozen' else f'{name} adapters'}"] = row
    columns = (
        ("forward µs", "forward", "8.1f", 1.0),
        ("backward", "backward", "8.1f", 1.0),
        ("layer", "both", "8.1f", 1.0),
        (f"{LAYERS} layers ms", "ms", "8.1f", 1.0),
        ("to 1", "ratio", "6.2f", 1.0),
    )
    return Found({"us_per_layer": results}, table(rows, columns))


def main() -> int:
    """Measures, prints, and writes the results."""
    return measured(__doc__, measure_all, out="host-cpu", turns=7, threads=1)
