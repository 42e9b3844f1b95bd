"""Modules of the base of which adapters train copies (`modules_to_save`), and heads that the base lacks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..adapters.kind import LayerSpec, TensorSpec
from ..adapters.trained_parts import TASK_HEAD, TASK_HEAD_WITH_BIAS, TRAINED_COPY
from ..frozen.plain import PlainWeight
from ..never_compiled import never_compiled
from ..ops.functional import scaling_dtype
from ..routing.route import LayerGroup
from ..routing.router import Router
from ..routing.row_groups import by_adapter, row_groups
from .adapter_layer import AdapterLayer
from .bank import ByAdapter
from .batch_statistics import follow_mode
from .linear import MultiLoRALinear
from .over_module import ModuleWeight, OverModule, plain_module

_WITHIN_SAMPLES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
)
"""Modules whose first dimension counts samples: see `sample_copies`."""
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)


class Copies(ByAdapter):
    """Holds the copies by the names of their adapters."""

    def of(self, name: str) -> nn.Module:
        """Returns an adapter's copy."""
        found = self._modules[name]
        assert found is not None
        return found

    def put(self, name: str, module: nn.Module) -> None:
        """Takes an adapter's copy."""
        self._modules[name] = module

    def take(self, name: str) -> None:
        """Drops an adapter's copy, if there is one."""
        self._modules.pop(name, None)


class TiedLinear(nn.Module):
    """A linear layer with the weight of an adapter's copy of an embedding: PEFT's `ensure_weight_tying`.

    Args:
        source: the embedding's layer.
        name: of the adapter.
    """

    def __init__(self, source: TrainedCopies, name: str) -> None:
        super().__init__()
        self.__dict__["source"], self.name = source, name  # no submodule: its weight is not this layer's

    @property
    def weight(self) -> nn.Parameter:
        """The embedding's table, `[V, D]`."""
        found = self.__dict__["source"].modules_to_save.of(self.name).weight
        assert isinstance(found, nn.Parameter)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class TrainedCopies(OverModule):
    """Sends the rows of each adapter through its own copy, and all other rows through the base's module.

    A copy starts with the base's weights. One that is tied has the weight of the adapter's copy of another
    layer. Beside a half-precision base a copy is kept and computed in fp32, as adapters are (PEFT keeps the
    base's dtype). Its keys in PEFT's files are the module's own, such as `score.weight`.
    """

    served: tuple[str, ...] | None = (TRAINED_COPY,)

    def __init__(self, base: nn.Module, **rest: Any) -> None:
        super().__init__(base, **rest)
        self.modules_to_save = Copies()

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        return why_not_copied(module) is None and not acts_on_samples(module)

    @classmethod
    def shapes(cls, module: nn.Module, spec: LayerSpec) -> dict[str, TensorSpec]:
        own = () if spec.tied_to else plain_module(module).named_parameters()
        return {part: TensorSpec(tuple(parameter.shape)) for part, parameter in own}

    def put(self, name: str, config: Any, spec: LayerSpec, seed: int) -> None:
        self.specs[name] = spec
        if spec.tied_to:
            return  # `tie` follows
        own = _plain_copy(self.base).to(self.adapter_dtype).requires_grad_(not config.inference_mode)
        follow_mode(own)
        self.modules_to_save.put(name, own)

    def tie(self, name: str, source: nn.Module) -> None:
        """Lets an adapter's copy have the weight of its copy of an embedding."""
        assert isinstance(source, TrainedCopies)
        self.modules_to_save.put(name, TiedLinear(source, name))

    def take(self, name: str) -> None:
        self.modules_to_save.take(name)
        del self.specs[name]
        self.written.discard(name)

    def parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        return dict(self.modules_to_save.of(name).named_parameters())

    def state_key(self, name: str, part: str) -> str:
        return f"modules_to_save.{name}.{part}"

    @classmethod
    def peft_keys(cls, module: nn.Module, spec: LayerSpec) -> dict[str, str]:
        return {part: part for part in (*cls.shapes(module, spec), *cls.buffer_shapes(module))}

    def own_part(self, adapter: str, name: str) -> Any:
        """Returns a parameter or part of an adapter's copy, in the base's dtype."""
        part = getattr(self.modules_to_save.of(adapter), name)
        if self.adapter_dtype == self.frozen.dtype:
            return part
        return _in_dtype(part, self.frozen.dtype) if isinstance(part, nn.Module) else self._as_base(part)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Applies the module, or adapters' copies of it.

        Args:
            x: `[..., D]`, the rows of the active route, or token ids `[...]`.
            args: more arguments; tensors have the same rows as x.

        Raises:
            ValueError: if no route says which adapter the rows belong to, the route describes other rows, or
                an argument has other rows than x.
        """
        if not self.group.adapters:
            return self.base(x, *args, **kwargs)
        return self._routed(x, args, kwargs)

    @never_compiled
    def _routed(self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = x if x.is_floating_point() else x.unsqueeze(-1)
        routed = self.routed(rows)
        if routed is None:
            return self.base(x, *args, **kwargs)
        active, place, batch = routed
        lead = rows.shape[:-1]
        groups = row_groups(active, place, batch, lead)
        modules = [*(self.modules_to_save.of(name) for name in active.names), self.base]
        if groups.order is None:
            return self._call(modules[groups.owners[0]], x, args, kwargs)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        if any(value.shape[: len(lead)] != lead for value in tensors.values()):
            raise ValueError(
                f"layer {self.name}: modules_to_save: a {type(self.base).__name__} that gets other rows "
                "beside x cannot be mixed; use one adapter for the whole batch"
            )

        def compute(owner: int, own: Sequence[Tensor]) -> Any:
            mine = given | dict(zip(tensors, own[1:], strict=True))
            positional = [mine[i] for i in range(len(args))]
            y = self._call(modules[owner], own[0], positional, {key: mine[key] for key in kwargs})
            dim = groups.dim or 0
            for one in y if type(y) is tuple else (y,):
                if not isinstance(one, Tensor) or one.shape[dim : dim + 1] != own[0].shape[dim : dim + 1]:
                    raise ValueError(
                        f"layer {self.name}: modules_to_save: a {type(self.base).__name__} that returns "
                        "something else than rows cannot be mixed; use one adapter for the whole batch"
                    )
            return y

        return by_adapter(groups, [x, *tensors.values()], lead, compute)

    def _call(self, module: nn.Module, x: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a copy in its own dtype; the result has the base's."""
        casts = module is not self.base and x.is_floating_point() and x.dtype != self.adapter_dtype
        if not casts or torch.is_autocast_enabled(x.device.type):
            y = module(x, *args, **kwargs)
        else:
            y = module(x.to(self.adapter_dtype), *args, **kwargs)
        if module is self.base or self.adapter_dtype == self.frozen.dtype:
            return y
        return tuple(map(self._as_base, y)) if type(y) is tuple else self._as_base(y)

    def _as_base(self, y: Any) -> Any:
        numbers = isinstance(y, Tensor) and y.is_floating_point()
        return y.to(self.frozen.dtype) if numbers else y


def _plain_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of a module as it was before conversion."""
    converted = [part for part in module.modules() if isinstance(part, AdapterLayer)]
    memo: dict[int, Any] = {id(part): copy.deepcopy(part.plain()) for part in converted}
    return copy.deepcopy(module, memo)


def _in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a module with the same parts, whose parameters and floating buffers have another dtype.

    Batch normalisation stays as it is: it takes rows of every dtype, and its buffers must follow its rows.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module
    parts, own, buffers = module._modules.items(), module._parameters.items(), module._buffers.items()
    view = copy.copy(module)
    view.__dict__["_modules"] = {key: None if part is None else _in_dtype(part, dtype) for key, part in parts}
    view.__dict__["_parameters"] = {key: None if p is None else p.to(dtype) for key, p in own}
    view.__dict__["_buffers"] = {
        key: b.to(dtype) if b is not None and b.is_floating_point() else b for key, b in buffers
    }
    return view


def acts_on_samples(module: nn.Module) -> bool:
    """Whether a module, converted or not, needs whole samples: it has convolutions or batch normalisation."""
    return any(isinstance(part, _WITHIN_SAMPLES) for part in plain_module(module).modules())


def why_not_copied(module: nn.Module) -> str | None:
    """Returns why adapters cannot train copies of a module, converted or not; None if they can."""
    if isinstance(module, MultiLoRALinear) and not isinstance(module.frozen, PlainWeight):
        return "is a linear layer whose weight is quantised or not in memory"
    module = plain_module(module)
    kind = type(module).__name__
    if any(not p.is_floating_point() or is_traceable_wrapper_subclass(p) for p in module.parameters()):
        return f"is a {kind} with quantised or sharded weights"
    if isinstance(module, _CONTAINERS):
        return f"is a {kind}, which is not called itself"
    if next(module.parameters(), None) is None:
        return f"is a {kind} without parameters"
    for part in module.modules():
        names = type(part).__name__
        if isinstance(part, nn.RNNBase | nn.MultiheadAttention) or "Attention" in names or "Mixer" in names:
            inside = "" if part is module else f", with a {names} in it"
            return f"is a {kind}{inside}, which looks at several rows at once"
    buffers = len(module.state_dict()) > len(list(module.named_parameters(remove_duplicate=False)))
    if buffers and not acts_on_samples(module):
        return f"is a {kind} whose buffers belong to its state"
    return None


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
