"""Section `decoder`: one Llama decoder layer with adapters on its seven linears, forward and backward.

Letters: N adapters with one sequence of L tokens each, D = hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from linear import oracle
from linear.contenders import Contender, Run
from linear.layouts import balanced, mixed_ranks
from linear.limits import Work, frozen, low_rank
from linear.oracle import Entry
from shared.results import dtype_name
from shared.shapes import MODELS, ModelShape
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import mlora_ext as mx
from microbench import model_parts as parts
from microbench.entries import FROZEN, able, limit, model_entry, timed
from microbench.settings import Case, Findings, Settings


@dataclass
class Batch:
    """One input of a decoder layer, and what its contenders are made of.

    Attributes:
        x, dy: `[N, L, D]`.
        rotary: cosines and sines, `[1, L, D / heads]` each.
        base: the frozen layer.
        model: the converted one.
        ranks: of its adapters.
        p: dropout probability.
    """

    x: Tensor
    dy: Tensor
    rotary: tuple[Tensor, Tensor]
    base: nn.Module
    model: nn.Module
    ranks: list[int]
    p: float

    def refresh(self) -> None:
        """Fresh random input and gradient."""
        with torch.no_grad():
            self.x.normal_()
            self.dy.normal_()

    def exact(self) -> Batch:
        """The same numbers in fp64."""
        x, dy = self.x.detach().double().requires_grad_(), self.dy.double()
        rotary = (self.rotary[0].double(), self.rotary[1].double())
        model = copy.deepcopy(self.model).double()
        return Batch(x, dy, rotary, copy.deepcopy(self.base).double(), model, self.ranks, self.p)

    def wanted(self, peft: list[nn.Module] | None = None) -> list[Tensor]:
        """What gradients are for."""
        return [self.x, *parts.ordered(self.model, len(self.ranks), peft or ())]

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The layer on some of the sequences."""
        return layer(x, attention_mask=None, position_embeddings=self.rotary)  # type: ignore[no-any-return]


def make(shape: ModelShape, adapters: int, length: int, settings: Settings, dtype: torch.dtype) -> Batch:
    """A random decoder layer and batch."""
    config = parts.llama_config(shape, 1, length)
    base, ranks = parts.decoder_layer(config, settings.device, dtype), mixed_ranks(adapters)
    sizes = (adapters, length, shape.hidden)
    x, dy = (torch.randn(sizes, device=settings.device).to(dtype) for _ in range(2))
    positions = torch.arange(length, device=settings.device)[None]
    rotary = LlamaRotaryEmbedding(config).to(settings.device)(x, positions)
    model = parts.converted(base, ranks, settings.dropout)
    return Batch(x.requires_grad_(), dy, rotary, base, model, ranks, settings.dropout)


def frozen_layer(batch: Batch) -> Contender:
    """The layer without adapters, and its dX."""
    return Contender(batch.dy, lambda: batch.apply(batch.base, batch.x), [batch.x])


def ours(batch: Batch, backend: Any, drop: bool = True) -> Contender:
    """The converted layer; every call has the masks of dropout step 0."""
    count, length = batch.x.shape[:2]
    layout, named = mx.SegmentLayout.from_lengths([length] * count), parts.names(count)

    def compute() -> Tensor:
        with mx.route(batch.model.train(drop), layout, named, steps=[0] * count):
            return batch.apply(batch.model, batch.x)

    return Contender(batch.dy, compute, batch.wanted(), lambda: mx.use_backend(backend))


def peft_loop(batch: Batch, drop: bool = True) -> Contender:
    """PEFT's layers, one after the other, each on its sequence."""
    models = parts.peft_models(batch.base, batch.model, batch.ranks, batch.p if drop else 0.0)

    def compute() -> Tensor:
        pairs = zip(models, batch.x.split(1), strict=True)
        return torch.cat([batch.apply(model, x) for model, x in pairs])

    return Contender(batch.dy, compute, batch.wanted(models))


def check(batch: Batch, name: str, dtype: torch.dtype, build: Callable[[bool], Contender]) -> float:
    """Compare with the fp64 oracle; PEFT without dropout, since its masks are others.

    Raises:
        WrongResult: if the result is wrong; names the contender.
    """
    exact, drop = batch.exact(), name.startswith("ours")
    if name == FROZEN:
        expected, plain = frozen_layer(exact)(), None
    else:
        expected, plain = ours(exact, "reference", drop)(), ours(batch, "reference", drop)()
    return oracle.compare(name, build(drop)(), expected, dtype, plain)


def decoder(settings: Settings, findings: Findings) -> Iterator[Case]:
    """One decoder layer of each model; the small one is checked first, the timed one with `--check`."""
    for name in settings.models:
        for adapters in settings.numbers:
            for rows in settings.rows:
                for dtype in settings.dtypes:
                    length = rows // adapters
                    label = f"{name} decoder layer, {adapters} x {length}, {dtype_name(dtype)}"
                    sizes = (name, adapters, length, dtype)
                    yield Case(label, partial(row, *sizes, settings, findings))


def row(
    name: str, adapters: int, length: int, dtype: torch.dtype, settings: Settings, findings: Findings
) -> dict[str, Any]:
    """One row of results."""
    where = f"{name} decoder, {adapters} x {length}, {dtype_name(dtype)}"
    small = make(MODELS["quick"], min(adapters, 4), 24, settings, dtype)
    batch = make(MODELS[name], adapters, length, settings, dtype)

    def builders(batch: Batch) -> dict[str, Callable[[bool], Contender]]:
        found: dict[str, Callable[[bool], Contender]] = {
            FROZEN: lambda drop: frozen_layer(batch),
            "PEFT loop": lambda drop: peft_loop(batch, drop),
        }
        for backend in settings.backends:
            found[f"ours, {backend}"] = lambda drop, backend=backend: ours(batch, backend, drop)  # type: ignore[misc]
        return found

    def prepared(entry: Entry) -> Run:
        check(small, entry.name, dtype, builders(small)[entry.name])
        if settings.check:
            check(batch, entry.name, dtype, builders(batch)[entry.name])
        run = builders(batch)[entry.name](True)
        run()
        return run

    named = [model_entry(each, mine=each.startswith("ours")) for each in builders(batch)]
    cases = able(findings, named, where, prepared)
    products, extra = seven_linears(MODELS[name], adapters, length, dtype.itemsize)
    work = {each: products + (Work() if each == FROZEN else extra) for each in cases}
    results = timed(cases, batch.refresh, work, settings, steady=True)
    return {
        "name": f"{name} decoder layer",
        "rows": adapters * length,
        "adapters": adapters,
        "ranks": batch.ranks,
        "layout": "balanced",
        "dtype": dtype_name(dtype),
        "dropout": settings.dropout,
        "work_counted": "the seven linears, without attention",
        "contenders": results,
        "limit": limit(products, extra, findings.ceiling(settings, dtype), results),
    }


def seven_linears(shape: ModelShape, adapters: int, length: int, element: int) -> tuple[Work, Work]:
    """The frozen and the low-rank work of a decoder layer's linears, forward and backward."""
    rows, ranks, lengths = adapters * length, mixed_ranks(adapters), balanced(adapters * length, adapters)
    products, extra = Work(), Work()
    for linear in shape.linears:
        sizes = (linear.d_in, linear.d_out, element)
        products += frozen(rows, *sizes).times(linear.count)
        extra += low_rank(lengths, ranks, *sizes).times(linear.count)
    return products, extra
