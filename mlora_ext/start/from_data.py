"""Initialises an adapter from its data: initialise_from_data, over one process or over several stages.

EVA also decides how ranks are distributed among layers (Paischer et al., 2024, Section 3).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..adapters.kind import LayerSpec
from ..adapters.lora_config import init_kind, needs_data
from ..errors import AdapterError
from ..layers.adapter_weights import adapter_layers
from ..layers.linear import MultiLoRALinear
from ..routing.router import router_of
from ..routing.undisturbed import undisturbed
from ..targets.add_remove import add_adapter, regroup, remove_adapter
from .statistics import start_specs, statistics_of

if TYPE_CHECKING:
    from peft import LoraConfig

STATISTICS_BYTES = 1 << 26
"""Bytes of statistics that a pass may hold; one layer's at least. More layers take more passes."""
_MOST_BATCHES = 1000
_MOST_RHO = 1000


def initialise_from_data(model: nn.Module, name: str, batches: Iterable[Any]) -> None:
    """Gives an adapter its initial values from its data: `init_lora_weights` of eva, corda or lora_ga.

    The base model runs on the batches without any adapter, several times if need be, so the result depends on
    the base, the batches, the seed and the names only. PEFT computes the values, layer by layer. Nothing else
    of the model changes. EVA may give layers other ranks, and take the adapter off some: make optimizers
    afterwards.

    Args:
        model: converted, with all layers in this process.
        name: of the adapter.
        batches: the model's arguments, each a dict, a tuple or a tensor. Padding (`attention_mask`) does not
            count; for EVA also tokens without a label (`labels`), unless `eva_config.use_label_mask` is off.
            For LoRA-GA, a batch must have labels, so that the model returns a loss. CorDA scales each batch
            alone: give one sample a batch for PEFT's result.

    Raises:
        ValueError: the model has no such adapter, its config asks for no data, it targets a layer that is not
            linear, there is no batch, a layer is too narrow for its rank or was not called, or the model
            returns no loss.

    Example:
        >>> model = convert_model(model, {"a": LoraConfig(init_lora_weights="eva", eva_config=EvaConfig())})
        >>> initialise_from_data(model, "a", [tokenizer(text, return_tensors="pt") for text in texts])
    """
    router = router_of(model)
    router.check_names("name", [name])
    config = router.adapters[name].config
    if not needs_data(config):
        raise AdapterError(
            name,
            f"init_lora_weights={config.init_lora_weights!r} needs no data; expected "
            "'eva', 'corda' or 'lora_ga'",
        )
    initialise(name, config, start_specs(model, name), _OneProcess(model, name, list(batches)))


class Passes(Protocol):
    """The base model, and an adapter's data; see `Statistics` for the verbs."""

    batches: int

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Calls a method of every process's statistics; returns their answers."""

    def run(self, index: int) -> None:
        """Runs the base model on a batch; LoRA-GA also backward."""

    def put_again(self, config: LoraConfig) -> None:
        """Puts the adapter on the model again, with another config."""


def initialise(name: str, config: LoraConfig, specs: Mapping[str, LayerSpec], passes: Passes) -> None:
    """Gives an adapter that awaits data its initial values.

    Args:
        name: the adapter's.
        config: its PEFT config.
        specs: its layers, in the model's order.
        passes: what runs.

    Raises:
        ValueError: there are no batches, a layer is too narrow for the rank, or was not called, or EVA's
            components do not converge.
    """
    if not passes.batches:
        raise AdapterError(name, "expected at least one batch of its data, got none")
    how, widths = init_kind(config), _of_all(passes, "widths")
    _check_widths(name, how, config, specs, widths)
    if how == "eva":
        _eva(name, config, specs, passes, max(max(width) for width in widths.values()))
    else:
        sizes = {key: 4 * d_in * (d_in if how == "corda" else d_out) for key, (d_in, d_out) in widths.items()}
        for group in _groups([key for key in specs if key in sizes], sizes):
            passes.ask("watch", group)
            for index in range(passes.batches):
                passes.run(index)
            passes.ask("fill", group)
    passes.ask("done")


def _of_all(passes: Passes, verb: str) -> dict[str, Any]:
    """Returns what all processes answer, by layer."""
    return {key: answer for part in passes.ask(verb) for key, answer in part.items()}


def _groups(layers: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    """Cuts layers into groups whose statistics fit together."""
    groups: list[list[str]] = []
    left = 0
    for key in layers:
        if not groups or sizes[key] > left:
            groups.append([])
            left = STATISTICS_BYTES
        groups[-1].append(key)
        left -= sizes[key]
    return groups


def _check_widths(
    name: str,
    how: str,
    config: LoraConfig,
    specs: Mapping[str, LayerSpec],
    widths: Mapping[str, tuple[int, int]],
) -> None:
    for key, (d_in, d_out) in widths.items():
        rank, width = specs[key].rank, min(d_in, d_out)
        if how == "eva":
            rank, width = round(rank * config.eva_config.rho), d_in  # type: ignore[union-attr]
        elif how == "lora_ga":
            rank *= 2
        if rank > width:
            what = {"eva": "rank · rho", "lora_ga": "2 · rank"}.get(how, "rank")
            raise AdapterError(
                name,
                f"layer {key}: init_lora_weights={how!r} needs {what} <= {width}, got "
                f"{rank}; lower the rank, or give the layer one of its own by rank_pattern",
            )


def _eva(name: str, config: LoraConfig, specs: Mapping[str, LayerSpec], passes: Passes, widest: int) -> None:
    settings: Any = config.eva_config
    rho = float(settings.rho)
    rho = min(rho, widest // config.r) if rho > _MOST_RHO else rho  # as PEFT lowers unusually large ones
    ranks = _Ranks({key: spec.rank for key, spec in specs.items()}, rho, settings.tau)
    passes.ask("watch", list(specs))
    passes.run(0)
    hashes = _of_all(passes, "hashes")
    for key in specs:
        if key not in hashes:
            raise AdapterError(name, f"layer {key} was not called by the first batch; leave it out")
    ranks.share(hashes)
    passes.ask("want", ranks.most, ranks.firsts)
    _until_converged(name, ranks, passes)
    found = {key: ranks.ranks[key] for key in specs}
    if any(found[key] != spec.rank for key, spec in specs.items()):
        passes.put_again(_redistributed(config, specs, found))
    passes.ask("fill", [key for key, rank in found.items() if rank])


def _until_converged(name: str, ranks: _Ranks, passes: Passes) -> None:
    reports: dict[str, Any] = {}
    for count, index in enumerate(islice(cycle(range(passes.batches)), _MOST_BATCHES)):
        passes.ask("watch", ranks.active)
        passes.run(index)
        reports |= _of_all(passes, "report")
        if count + 1 == passes.batches and not reports:
            raise AdapterError(
                name,
                f"no batch has as many tokens as EVA needs components "
                f"({max(ranks.most.values())}); use larger batches, a lower rank or eva_config.rho",
            )
        ranks.decide(reports)
        if not ranks.active:
            return
    raise AdapterError(
        name,
        f"EVA's components of layer {ranks.active[0]} have not converged after "
        f"{_MOST_BATCHES} batches; lower eva_config.tau, or use larger batches",
    )


@dataclass
class _Ranks:
    """Decides after each batch which layers have converged, and how many ranks each one gets, as PEFT does.

    Args:
        budget: the ranks that the config asks for, by layer, in the model's order.
        rho: a layer gets at most `rho` times its rank.
        tau: cosine similarity at which a component has converged.

    Attributes:
        most: components that each layer's inputs are asked for.
        firsts: the layer by whose components each layer begins; by equal inputs.
        ranks: of each layer so far.
        active: layers whose components have not converged.
    """

    budget: Mapping[str, int]
    rho: float
    tau: float
    most: dict[str, int] = field(default_factory=dict)
    firsts: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)

    def share(self, hashes: Mapping[str, str]) -> None:
        """Groups layers by the hashes of their inputs."""
        groups: dict[str, list[str]] = {}
        for key in self.budget:
            groups.setdefault(hashes[key], []).append(key)
        most = {key: round(rank * self.rho) for key, rank in self.budget.items()}
        own = {key: key for keys in groups.values() for key in keys[:1]}
        own = {key: key for key in self.budget if key in own}
        shared = {key: keys[0] for keys in groups.values() for key in keys[1:]}
        self.firsts = own | shared
        self.most = {key: max(most[other] for other in groups[hashes[key]]) for key in self.budget}
        self.ranks, self.active = dict(self.most), list(own)

    def decide(self, reports: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
        """Takes in what the layers' components look like after a batch.

        Args:
            reports: of each first layer, explained variance ratios, and how alike each component is to the
                one before the batch; empty = unknown.
        """
        firsts = [key for key, first in self.firsts.items() if key == first]
        if all(key in reports for key in firsts):
            self.ranks = self._distributed({key: reports[key][0] for key in firsts})
        self.active = [key for key in firsts if not self._converged(key, reports)]

    def _converged(self, key: str, reports: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> bool:
        if key not in reports:
            return False
        alike, rank = reports[key][1], self.ranks[key]
        return all(value >= self.tau for value in alike[:rank]) and (bool(alike) or not rank)

    def _distributed(self, ratios: Mapping[str, Sequence[float]]) -> dict[str, int]:
        """Gives the whole budget to the components that explain most."""
        pairs = [(key, v) for key, first in self.firsts.items() for v in ratios[first][: self.most[first]]]
        order = torch.tensor([value for _, value in pairs], dtype=torch.float64, device="cpu").argsort(
            descending=True
        )
        total = sum(self.budget.values())
        counts = Counter(pairs[i][0] for i in order[:total].tolist())
        found = {key: counts.get(key, 0) for key in self.firsts}
        for key, first in self.firsts.items():  # the first layer of equal inputs has the most ranks
            if found[first] < found[key]:
                found[first], found[key] = found[key], found[first]
        return found


def _redistributed(
    config: LoraConfig, specs: Mapping[str, LayerSpec], ranks: Mapping[str, int]
) -> LoraConfig:
    """Returns the config of an adapter whose layers got these ranks; layers without ranks lose the adapter.

    Scalings stay as they were unless `adjust_scaling_factors` is off, as in PEFT.
    """
    config = copy.deepcopy(config)
    adjusts = config.eva_config.adjust_scaling_factors  # type: ignore[union-attr]
    rank_pattern, alpha_pattern = {}, {}
    for key, rank in ranks.items():
        old = specs[key].rank
        alpha = specs[key].scaling * (old**0.5 if config.use_rslora else old)
        alpha = alpha * rank / old if adjusts and rank != old else alpha
        if rank and rank != config.r:
            rank_pattern[key] = rank
        if rank and alpha != config.lora_alpha:
            alpha_pattern[key] = alpha
    config.target_modules = [key for key, rank in ranks.items() if rank]
    config.rank_pattern, config.alpha_pattern = rank_pattern, alpha_pattern
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    return config


class _OneProcess:
    """See `Passes`: a whole model in this process."""

    def __init__(self, model: nn.Module, name: str, batches: Sequence[Any]) -> None:
        self._model, self._name, self._given = model, name, batches
        self._statistics = statistics_of(model, name)
        self.batches = len(batches)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._config = router_of(model).adapters[name].config
        self._backward = init_kind(self._config) == "lora_ga"

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        return [getattr(self._statistics, verb)(*arguments)]

    def run(self, index: int) -> None:
        model, batch = self._model, _moved(self._given[index], self._device)
        args, kwargs = _arguments(batch)
        self._statistics.take(self._rows(kwargs), 1 / self.batches)
        modes = [(part, part.training) for part in model.modules()]
        with undisturbed(model), router_of(model).observed_by(self._statistics):
            model.train(self._backward)
            try:
                with torch.set_grad_enabled(self._backward):
                    output = model.forward(*args, **kwargs)
                    if self._backward:
                        self._loss(output).backward()  # type: ignore[no-untyped-call]
            finally:
                for part, mode in modes:
                    part.training = mode

    def put_again(self, config: LoraConfig) -> None:
        router, name = router_of(self._model), self._name
        order, before = list(router.adapters), router.adapters[name]
        default, autocast = router.default, self._autocasts()
        remove_adapter(self._model, name)
        add_adapter(self._model, name, config, autocast_adapter_dtype=autocast)
        after = router.adapters[name]
        after.seed, after.start_seed, router.default = before.seed, before.start_seed, default
        router.adapters = {key: router.adapters[key] for key in order}
        regroup(self._model)

    def _autocasts(self) -> bool:
        layers = adapter_layers(self._model, self._name).values()
        linear = [layer for layer in layers if isinstance(layer, MultiLoRALinear)]
        return any(layer.lora_A.dtype != layer.frozen.dtype for layer in linear)

    def _rows(self, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Returns which tokens of a batch count, `[T]`; None: all."""
        mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
        rows = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        eva = getattr(self._config, "eva_config", None)
        if eva is not None and eva.use_label_mask and isinstance(labels, Tensor) and labels.dim() == 2:
            trained = labels != eva.label_mask_value
            rows = trained if rows is None else rows & trained
        return None if rows is None else rows.reshape(-1)

    def _loss(self, output: Any) -> Tensor:
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is None or loss.dim() or not loss.requires_grad:
            raise AdapterError(
                self._name,
                "init_lora_weights='lora_ga' needs a loss: give batches with "
                "labels, so that the model returns one",
            )
        return loss


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _moved(batch: Any, device: torch.device) -> Any:
    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) else leaf

    return torch.utils._pytree.tree_map(move, dict(batch) if isinstance(batch, Mapping) else batch)
