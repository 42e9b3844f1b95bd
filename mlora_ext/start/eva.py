"""How EVA distributes ranks among layers, and the config that follows (Paischer et al., 2024, Section 3)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..adapters.kind import LayerSpec

if TYPE_CHECKING:
    from peft import LoraConfig

_MOST_RHO = 1000


@dataclass
class Ranks:
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


def rank_limit(config: LoraConfig, widest: int) -> float:
    """Returns EVA's rho; PEFT lowers unusually large ones."""
    rho = float(config.eva_config.rho)  # type: ignore[union-attr]
    return min(rho, widest // config.r) if rho > _MOST_RHO else rho


def redistributed(config: LoraConfig, specs: Mapping[str, LayerSpec], ranks: Mapping[str, int]) -> LoraConfig:
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
