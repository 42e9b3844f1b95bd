"""Which passes over an adapter's data its initialisation makes, on one process or over several stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Protocol

from ..adapters.kind import LayerSpec
from ..adapters.lora_config import init_kind
from ..errors import AdapterError
from .eva import Ranks, rank_limit, redistributed

if TYPE_CHECKING:
    from peft import LoraConfig

STATISTICS_BYTES = 1 << 26
"""Bytes of statistics that a pass may hold; one layer's at least. More layers take more passes."""
_MOST_BATCHES = 1000


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
    sizes: dict[str, int] = {key: size for part in passes.ask("sizes") for key, size in part.items()}
    _check_widths(name, init_kind(config), config, specs, _widths(passes))
    if init_kind(config) == "eva":
        _eva(name, config, specs, passes)
    else:
        for group in _groups([key for key in specs if key in sizes], sizes):
            passes.ask("watch", group)
            for index in range(passes.batches):
                passes.run(index)
            passes.ask("fill", group)
    passes.ask("done")


def _widths(passes: Passes) -> dict[str, tuple[int, int]]:
    return {key: width for part in passes.ask("widths") for key, width in part.items()}


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


def _eva(name: str, config: LoraConfig, specs: Mapping[str, LayerSpec], passes: Passes) -> None:
    settings: Any = config.eva_config
    widest = max(max(width) for width in _widths(passes).values())
    budget = {key: spec.rank for key, spec in specs.items()}
    ranks = Ranks(budget, rank_limit(config, widest), settings.tau)
    passes.ask("compare")
    passes.run(0)
    hashes = {key: digest for part in passes.ask("hashes") for key, digest in part.items()}
    for key in specs:
        if key not in hashes:
            raise AdapterError(name, f"layer {key} was not called by the first batch; leave it out")
    ranks.share(hashes)
    passes.ask("want", ranks.most)
    _until_converged(name, ranks, passes)
    passes.ask("share_with", ranks.firsts)
    found = {key: ranks.ranks[key] for key in specs}
    if any(found[key] != spec.rank for key, spec in specs.items()):
        passes.put_again(redistributed(config, specs, found))
        passes.ask("moved")
    passes.ask("fill", [key for key, rank in found.items() if rank])


def _until_converged(name: str, ranks: Ranks, passes: Passes) -> None:
    reports: dict[str, Any] = {}
    for count, index in enumerate(islice(cycle(range(passes.batches)), _MOST_BATCHES)):
        passes.ask("watch", ranks.active)
        passes.run(index)
        reports |= {key: report for part in passes.ask("report") for key, report in part.items()}
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
