"""Adapters that PEFT initialises with `init_lora_weights`, alone on a model of their own: the oracle."""

import copy
import dataclasses
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import VOCABULARY
from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.loraga import preprocess_loraga
from torch import nn

from mlora_ext.start.statistics import signs_of
from mlora_ext.targets.add_remove import named_seed
from mlora_ext.targets.find import target_layers

SEED = 5
STARTS: dict[str, dict[str, Any]] = {
    "orthogonal": {},
    "pissa": {},
    "pissa_niter_4": {},
    "olora": {},
    "eva": {"eva_config": EvaConfig(rho=1.5, tau=0.9)},
    "corda": {"corda_config": CordaConfig(corda_method="kpm")},
    "lora_ga": {"lora_ga_config": LoraGAConfig()},
}
DATA = ("eva", "corda", "lora_ga")


def config_of(how: str, **fields: Any) -> LoraConfig:
    given = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **STARTS[how], **fields}
    return LoraConfig(init_lora_weights=how, **given)


def data_of(how: str, count: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Batches of tokens, some without a label. PEFT's CorDA takes one sample a batch.

    CorDA inverts the inputs' covariance, so it gets more rows than a layer has inputs: the inverse of a
    singular one, which both sides damp, magnifies rounding.
    """
    count = count or (16 if how == "corda" else 4)
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(2, VOCABULARY, (1 if how == "corda" else 3, 12), generator=draw)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)
        found.append({"input_ids": ids, "labels": labels})
    return found


def with_signs(svd: Any) -> Any:
    """A decomposition whose vectors have positive largest entries; PEFT takes A and B of different ones."""

    def decomposed(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        u, s, v = svd(*args, **kwargs)
        return u * signs_of(u.t()).t(), s, v * signs_of(v.t()).t()

    return decomposed


def by_peft(
    base: nn.Module, config: LoraConfig, data: Sequence[Any], name: str, patch: pytest.MonkeyPatch
) -> nn.Module:
    """PEFT's model over a copy of the base, initialised by PEFT's own functions.

    Before PEFT initialises a layer, torch gets our seed of the adapter in that layer. The signs of singular
    vectors, which are arbitrary, are ours: LoRA-GA's differ in a way that training notices.
    """
    base, config = copy.deepcopy(base), copy.deepcopy(config)
    config.target_modules = list(target_layers(base, name, config))
    if config.init_lora_weights == "corda":
        # PEFT's module takes one decorator of the package attrs
        patch.setitem(sys.modules, "attr", types.SimpleNamespace(dataclass=dataclasses.dataclass))
        from peft.tuners.lora.corda import preprocess_corda

        preprocess_corda(base, config, lambda: [base(**batch) for batch in data])
    if config.init_lora_weights == "lora_ga":
        preprocess_loraga(base, config, lambda: [base(**batch).loss.backward() for batch in data])
    names = {id(module): key for key, module in base.named_modules()}
    update = LoraLayer.update_layer

    def seeded(self: LoraLayer, *args: Any, **kwargs: Any) -> None:
        if id(self.get_base_layer()) in names:
            torch.manual_seed(named_seed(SEED, name, names[id(self.get_base_layer())]))
        update(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(LoraLayer, "update_layer", seeded)
        if config.init_lora_weights == "lora_ga":
            context.setattr(torch, "svd_lowrank", with_signs(torch.svd_lowrank))
        peft = get_peft_model(base, config)
    if config.init_lora_weights == "corda":
        for layer in (module for module in peft.modules() if isinstance(module, LoraLayer)):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            signs = signs_of(a.data)
            a.data *= signs
            b.data *= signs.t()
    if config.init_lora_weights == "eva":
        initialize_lora_eva_weights(peft, data, show_progress_bar=False)
    return peft
