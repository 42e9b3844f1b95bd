"""Heads of adapters that the base model lacks, such as `score` beside a causal model's body."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..adapters.kind import LayerSpec, TensorSpec
from ..adapters.trained_parts import TASK_HEAD, TASK_HEAD_WITH_BIAS
from ..ops.functional import scaling_dtype
from ..routing.route import LayerGroup
from ..routing.router import Router
from .adapter_layer import AdapterLayer
from .copies import Copies, TrainedCopies
from .over_module import ModuleWeight


class TaskHeads(TrainedCopies):
    """Holds a linear head `[num_labels, D]` for each of some adapters; the loss calls them.

    Args:
        beside: the model's own output head: where these heads are, and of which dtype the base is.
        width: D.
        std: of initial weights, as Transformers' `initializer_range`.
        router: shared by all layers of the model.
        name: of the layer in the model, for messages and in PEFT's files.
        body: what the model calls its body, and what the class with such a head calls it in PEFT's files.
    """

    served = (TASK_HEAD, TASK_HEAD_WITH_BIAS)

    def __init__(
        self,
        beside: nn.Module,
        width: int,
        std: float,
        *,
        router: Router,
        name: str,
        body: tuple[str, str] = ("", ""),
    ) -> None:
        frozen = ModuleWeight(beside)
        group = LayerGroup((), (), (), frozen.device, scaling_dtype(frozen.dtype))
        AdapterLayer.__init__(
            self, router=router, name=name, index=-1, adapter_dtype=torch.float32, group=group
        )
        self.frozen, self.width, self.std, self.body = frozen, width, std, body
        self.__dict__["base"] = nn.Identity()
        self.modules_to_save = Copies()

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        return isinstance(module, cls)

    @classmethod
    def shapes(cls, module: nn.Module, spec: LayerSpec) -> dict[str, TensorSpec]:
        weight = {"weight": TensorSpec((spec.rank, int(module.width)))}  # type: ignore[arg-type]
        return weight | ({"bias": TensorSpec((spec.rank,))} if spec.kind == TASK_HEAD_WITH_BIAS else {})

    def put(self, name: str, config: Any, spec: LayerSpec, seed: int) -> None:
        with torch.device("cpu"):
            head = nn.Linear(self.width, spec.rank, bias=spec.kind == TASK_HEAD_WITH_BIAS)
        nn.init.normal_(head.weight, std=self.std, generator=torch.Generator("cpu").manual_seed(seed))
        if head.bias is not None:
            nn.init.zeros_(head.bias)
        self.modules_to_save.put(name, head.to(self.frozen.device).requires_grad_(not config.inference_mode))
        self.specs[name] = spec
