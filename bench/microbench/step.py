"""Section `step`: a training step of a small Llama in a plain torch loop, with AdamW.

Letters: N adapters with one sequence of L tokens each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from linear import oracle
from linear.contenders import Run
from linear.layouts import mixed_ranks
from linear.oracle import Entry
from shared.results import dtype_name
from shared.shapes import MODELS
from torch import Tensor, nn

import mlora_ext as mx
from microbench import model_parts as parts
from microbench.entries import FROZEN, able, model_entry, timed
from microbench.settings import Case, Findings, Settings

MODEL, CPU_LAYERS = "tinyllama", 2
ROUNDS = 5


class Together:
    """mlora_ext: all adapters in one batch, one optimizer over all of them."""

    def __init__(self, model: nn.Module, ids: Tensor, backend: Any) -> None:
        self.model, self.ids = model, ids
        self.around = lambda: nullcontext() if backend is None else mx.use_backend(backend)
        self.names = parts.names(len(ids))
        self.parameters = parts.ordered(model, len(ids))
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def backward(self) -> list[Tensor]:
        """Gradients of the sum of the adapters' losses."""
        with self.around():
            out = self.model(input_ids=self.ids, labels=self.ids, use_cache=False, adapter_names=self.names)
            (out.loss * len(self.names)).backward()
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def __call__(self) -> list[Tensor]:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return []


class OneByOne:
    """PEFT: a model and an optimizer for each adapter, one after the other."""

    def __init__(self, models: list[nn.Module], like: nn.Module, ids: Tensor) -> None:
        self.models, self.ids = models, ids
        self.parameters = parts.ordered(like, len(ids), models)
        mine = [[parameter for _, parameter in parts.peft_parameters(model)] for model in models]
        self.optimizers = [torch.optim.AdamW(each, lr=1e-4, fused=True) for each in mine]

    def backward(self) -> list[Tensor]:
        """Gradients of each adapter's loss."""
        for model, ids in zip(self.models, self.ids.split(1), strict=True):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def __call__(self) -> list[Tensor]:
        for model, ids, optimizer in zip(self.models, self.ids.split(1), self.optimizers, strict=True):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return []


def frozen_model(base: nn.Module, ids: Tensor) -> Run:
    """Forward and backward down to the embeddings, without adapters or an optimizer."""

    def run() -> list[Tensor]:
        x = base.get_input_embeddings()(ids).requires_grad_()  # type: ignore[operator]
        loss = base(inputs_embeds=x, labels=ids, use_cache=False).loss
        return list(torch.autograd.grad(loss, [x]))

    return run


def check(settings: Settings, name: str, backend: Any) -> float:
    """Gradients of a tiny fp32 model without dropout, compared with the same in fp64 on the reference.

    Raises:
        WrongResult: naming the contender.
    """
    shape, dtype = MODELS["quick"], torch.float32
    ids = torch.randint(shape.vocabulary, (4, 24), device=settings.device)
    base = parts.language_model(parts.llama_config(shape, shape.layers, 24), settings.device, dtype)
    model, ranks = parts.converted(base, mixed_ranks(4), 0.0), mixed_ranks(4)
    if name == FROZEN:
        exact = frozen_model(copy.deepcopy(base).double(), ids)()
        return oracle.compare(name, frozen_model(base, ids)(), exact, dtype)
    exact = Together(copy.deepcopy(model).double(), ids, "reference").backward()
    plain = [grad.clone() for grad in Together(copy.deepcopy(model), ids, "reference").backward()]
    contender: Together | OneByOne = (
        OneByOne(parts.peft_models(base, model, ranks, 0.0), model, ids)
        if backend is None
        else Together(model, ids, backend)
    )
    return oracle.compare(name, contender.backward(), exact, dtype, plain)


def step(settings: Settings, findings: Findings) -> Iterator[Case]:
    """A step of TinyLlama: all of its layers on a GPU, two on a CPU."""
    name = "quick" if settings.quick else MODEL
    layers = CPU_LAYERS if settings.device.type == "cpu" else MODELS[name].layers
    for adapters in settings.numbers:
        for rows in settings.rows:
            for dtype in settings.dtypes:
                length = rows // adapters
                label = f"{name} step, {layers} layers, {adapters} x {length}, {dtype_name(dtype)}"
                sizes = (name, layers, adapters, length, dtype)
                yield Case(label, partial(row, *sizes, settings, findings))


def row(
    name: str,
    layers: int,
    adapters: int,
    length: int,
    dtype: torch.dtype,
    settings: Settings,
    findings: Findings,
) -> dict[str, Any]:
    """One row of results."""
    shape, ranks = MODELS[name], mixed_ranks(adapters)
    config = parts.llama_config(shape, layers, length)
    base = parts.language_model(config, settings.device, dtype)
    ids = torch.randint(shape.vocabulary, (adapters, length), device=settings.device)
    model = parts.converted(base, ranks, settings.dropout)

    def one_by_one() -> Run:
        return OneByOne(parts.peft_models(base, model, ranks, settings.dropout), model, ids)

    builders: dict[str, tuple[Any, Callable[[], Run]]] = {
        FROZEN: (None, lambda: frozen_model(base, ids)),
        "PEFT, one after the other": (None, one_by_one),
    }
    for backend in settings.backends:
        builders[f"ours, {backend}"] = (backend, lambda backend=backend: Together(model, ids, backend))  # type: ignore[misc]

    def prepared(entry: Entry) -> Run:
        backend, build = builders[entry.name]
        check(settings, entry.name, backend)
        run = build()
        run()
        return run

    named = [model_entry(each, mine=backend is not None) for each, (backend, _) in builders.items()]
    cases = able(findings, named, f"{name} step, {adapters} x {length}, {dtype_name(dtype)}", prepared)
    rounds = min(settings.rounds, ROUNDS)
    results = timed(cases, lambda: None, {}, settings, steady=True, rounds=rounds)
    for each in results.values():
        each["tokens_per_second"] = adapters * length / each["seconds"]
    return {
        "name": f"{name} training step",
        "layers": layers,
        "rows": adapters * length,
        "adapters": adapters,
        "ranks": ranks,
        "layout": "balanced",
        "dtype": dtype_name(dtype),
        "dropout": settings.dropout,
        "contenders": results,
    }
