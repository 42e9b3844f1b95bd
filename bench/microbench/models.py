"""Sections `decoder` and `step`: one Llama decoder layer, and a training step of a small Llama with AdamW.

Frozen, converted by mlora_ext, and as PEFT's models; all of them share the memory of one base. Letters: N
adapters with one sequence of L tokens each, D = hidden.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from linear import oracle
from linear.contenders import SCALING, Contender, Run
from linear.layouts import balanced, mixed_ranks
from linear.limits import Work, frozen, low_rank
from peft import LoraConfig, get_peft_model
from shared.results import dtype_name
from shared.shapes import ALL_LINEAR, MODELS, ModelShape
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import mlora_ext as mx
from microbench.entries import FROZEN, whole_row
from microbench.settings import Case, Findings, Settings


def llama_config(shape: ModelShape, layers: int, length: int) -> LlamaConfig:
    """Transformers' config of a model, SDPA attention."""
    options = replace(shape, layers=layers).options
    positions = max(length, 16)
    return LlamaConfig(**options, max_position_embeddings=positions, attn_implementation="sdpa")


def decoder_layer(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A random decoder layer, frozen."""
    with device:
        layer = LlamaDecoderLayer(config, 0)
    return layer.to(dtype).requires_grad_(False)


def language_model(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A random Llama, frozen."""
    with device:
        model = LlamaForCausalLM(config)
    return model.to(dtype).requires_grad_(False)


def shared(base: nn.Module) -> nn.Module:
    """A copy of the modules over the same memory."""
    return copy.deepcopy(base, {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())})


def names(adapters: int) -> list[str]:
    """`a0`, `a1`, ..."""
    return [f"a{index}" for index in range(adapters)]


def lora(rank: int, p: float) -> LoraConfig:
    """LoRA on all seven linears; adapters of a bf16 or fp16 base are fp32, as is the default."""
    return LoraConfig(r=rank, lora_alpha=int(SCALING * rank), lora_dropout=p, target_modules=list(ALL_LINEAR))


def converted(base: nn.Module, ranks: Sequence[int], p: float) -> nn.Module:
    """mlora_ext's model with one adapter for each rank, as trained ones look: no B is zero."""
    configs = {name: lora(rank, p) for name, rank in zip(names(len(ranks)), ranks, strict=True)}
    model = mx.convert_model(shared(base), configs)
    with torch.no_grad():
        for name in configs:
            for key, parameter in mx.adapter_parameters(model, name).items():
                if "lora_B" in key:
                    parameter.normal_(std=0.05)
    return model.train()


def peft_models(base: nn.Module, like: nn.Module, ranks: Sequence[int], p: float) -> list[nn.Module]:
    """PEFT's models, one for each adapter of `like`, with its numbers."""
    models = []
    for name, rank in zip(names(len(ranks)), ranks, strict=True):
        model = get_peft_model(shared(base), lora(rank, p))
        mine = mx.adapter_parameters(like, name)
        with torch.no_grad():
            for key, parameter in peft_parameters(model):
                parameter.copy_(mine[key.replace(".default.", f".{name}.")])
        models.append(model.train())
    return models


def peft_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """PEFT's adapter by the names in the base model, A before B in every layer."""
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield key.removeprefix("base_model.model."), parameter


def ordered(like: nn.Module, adapters: int, peft: Sequence[nn.Module] = ()) -> list[Tensor]:
    """The adapters' Parameters, adapter after adapter, in one order for mlora_ext's and PEFT's models."""
    found: list[Tensor] = []
    for index, name in enumerate(names(adapters)):
        mine = mx.adapter_parameters(like, name)
        theirs = dict(peft_parameters(peft[index])) if peft else {}
        found += [theirs[key.replace(f".{name}.", ".default.")] if peft else mine[key] for key in mine]
    return found


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
        return [self.x, *ordered(self.model, len(self.ranks), peft or ())]

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The layer on some of the sequences."""
        return layer(x, attention_mask=None, position_embeddings=self.rotary)  # type: ignore[no-any-return]


def make(shape: ModelShape, adapters: int, length: int, settings: Settings, dtype: torch.dtype) -> Batch:
    """A random decoder layer and batch."""
    config = llama_config(shape, 1, length)
    base, ranks = decoder_layer(config, settings.device, dtype), mixed_ranks(adapters)
    sizes = (adapters, length, shape.hidden)
    x, dy = (torch.randn(sizes, device=settings.device).to(dtype) for _ in range(2))
    positions = torch.arange(length, device=settings.device)[None]
    rotary = LlamaRotaryEmbedding(config).to(settings.device)(x, positions)
    model = converted(base, ranks, settings.dropout)
    return Batch(x.requires_grad_(), dy, rotary, base, model, ranks, settings.dropout)


def frozen_layer(batch: Batch) -> Contender:
    """The layer without adapters, and its dX."""
    return Contender(batch.dy, lambda: batch.apply(batch.base, batch.x), [batch.x])


def ours(batch: Batch, backend: Any, drop: bool = True) -> Contender:
    """The converted layer; every call has the masks of dropout step 0."""
    count, length = batch.x.shape[:2]
    layout, named = mx.SegmentLayout.from_lengths([length] * count), names(count)

    def compute() -> Tensor:
        with mx.route(batch.model.train(drop), layout, named, steps=[0] * count):
            return batch.apply(batch.model, batch.x)

    return Contender(batch.dy, compute, batch.wanted(), lambda: mx.use_backend(backend))


def peft_loop(batch: Batch, drop: bool = True) -> Contender:
    """PEFT's layers, one after the other, each on its sequence."""
    models = peft_models(batch.base, batch.model, batch.ranks, batch.p if drop else 0.0)

    def compute() -> Tensor:
        pairs = zip(models, batch.x.split(1), strict=True)
        return torch.cat([batch.apply(model, x) for model, x in pairs])

    return Contender(batch.dy, compute, batch.wanted(models))


def check_layer(batch: Batch, name: str, dtype: torch.dtype, build: Callable[[bool], Contender]) -> float:
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
    sizes = (settings.models, settings.numbers, settings.rows, settings.dtypes)
    for name, adapters, rows, dtype in product(*sizes):
        label = f"{name} decoder layer, {adapters} x {rows // adapters}, {dtype_name(dtype)}"
        yield Case(label, partial(layer_row, name, adapters, rows // adapters, dtype, settings, findings))


def layer_row(
    name: str, adapters: int, length: int, dtype: torch.dtype, settings: Settings, findings: Findings
) -> dict[str, Any]:
    """One row of results."""
    small = make(MODELS["quick"], min(adapters, 4), 24, settings, dtype)
    batch = make(MODELS[name], adapters, length, settings, dtype)

    def builders(batch: Batch) -> dict[str, Callable[..., Contender]]:
        found: dict[str, Callable[..., Contender]] = {
            FROZEN: lambda drop=True: frozen_layer(batch),
            "PEFT loop": partial(peft_loop, batch),
        }
        return found | {f"ours, {backend}": partial(ours, batch, backend) for backend in settings.backends}

    def check(contender: str) -> None:
        for each in (small, batch) if settings.check else (small,):
            check_layer(each, contender, dtype, builders(each)[contender])

    about = {"name": f"{name} decoder layer", "rows": adapters * length, "adapters": adapters}
    about |= {"ranks": batch.ranks, "layout": "balanced"}
    about |= {"work_counted": "the seven linears, without attention"}
    work = seven_linears(MODELS[name], adapters, length, dtype.itemsize)
    return whole_row(about, builders(batch), check, batch.refresh, work, dtype, settings, findings)


def seven_linears(shape: ModelShape, adapters: int, length: int, element: int) -> tuple[Work, Work]:
    """The frozen and the low-rank work of a decoder layer's linears, forward and backward."""
    rows, ranks, lengths = adapters * length, mixed_ranks(adapters), balanced(adapters * length, adapters)
    products, extra = Work(), Work()
    for linear in shape.linears:
        sizes = (linear.d_in, linear.d_out, element)
        products += frozen(rows, *sizes).times(linear.count)
        extra += low_rank(lengths, ranks, *sizes).times(linear.count)
    return products, extra


MODEL, CPU_LAYERS = "tinyllama", 2
ROUNDS = 5


class Together:
    """mlora_ext: all adapters in one batch, one optimizer over all of them."""

    def __init__(self, model: nn.Module, ids: Tensor, backend: Any) -> None:
        self.model, self.ids = model, ids
        self.around = lambda: nullcontext() if backend is None else mx.use_backend(backend)
        self.names = names(len(ids))
        self.parameters = ordered(model, len(ids))
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
        self.parameters = ordered(like, len(ids), models)
        mine = [[parameter for _, parameter in peft_parameters(model)] for model in models]
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


def check_step(settings: Settings, name: str, backend: Any) -> float:
    """Gradients of a tiny fp32 model without dropout, compared with the same in fp64 on the reference.

    Raises:
        WrongResult: naming the contender.
    """
    shape, dtype = MODELS["quick"], torch.float32
    ids = torch.randint(shape.vocabulary, (4, 24), device=settings.device)
    base = language_model(llama_config(shape, shape.layers, 24), settings.device, dtype)
    model, ranks = converted(base, mixed_ranks(4), 0.0), mixed_ranks(4)
    if name == FROZEN:
        exact = frozen_model(copy.deepcopy(base).double(), ids)()
        return oracle.compare(name, frozen_model(base, ids)(), exact, dtype)
    exact = Together(copy.deepcopy(model).double(), ids, "reference").backward()
    plain = [grad.clone() for grad in Together(copy.deepcopy(model), ids, "reference").backward()]
    contender: Together | OneByOne = (
        OneByOne(peft_models(base, model, ranks, 0.0), model, ids)
        if backend is None
        else Together(model, ids, backend)
    )
    return oracle.compare(name, contender.backward(), exact, dtype, plain)


def step(settings: Settings, findings: Findings) -> Iterator[Case]:
    """A step of TinyLlama: all of its layers on a GPU, two on a CPU."""
    name = "quick" if settings.quick else MODEL
    layers = CPU_LAYERS if settings.device.type == "cpu" else MODELS[name].layers
    for adapters, rows, dtype in product(settings.numbers, settings.rows, settings.dtypes):
        length = rows // adapters
        label = f"{name} step, {layers} layers, {adapters} x {length}, {dtype_name(dtype)}"
        yield Case(label, partial(step_row, name, layers, adapters, length, dtype, settings, findings))


def step_row(
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
    config = llama_config(shape, layers, length)
    base = language_model(config, settings.device, dtype)
    ids = torch.randint(shape.vocabulary, (adapters, length), device=settings.device)
    model = converted(base, ranks, settings.dropout)

    def one_by_one() -> Run:
        return OneByOne(peft_models(base, model, ranks, settings.dropout), model, ids)

    builders: dict[str, Callable[[], Run]] = {
        FROZEN: lambda: frozen_model(base, ids),
        "PEFT, one after the other": one_by_one,
    }
    backends = {f"ours, {backend}": backend for backend in settings.backends}
    builders |= {each: partial(Together, model, ids, backend) for each, backend in backends.items()}

    def check(contender: str) -> float:
        return check_step(settings, contender, backends.get(contender))

    about = {"name": f"{name} training step", "layers": layers, "rows": adapters * length}
    about |= {"adapters": adapters, "ranks": ranks, "layout": "balanced"}
    rounds = min(settings.rounds, ROUNDS)
    row = whole_row(about, builders, check, lambda: None, None, dtype, settings, findings, rounds)
    for each in row["contenders"].values():
        each["tokens_per_second"] = adapters * length / each["seconds"]
    return row
