"""Adapters on parameters of a module of the base (`target_parameters`), such as the matrix of a router."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode

from ..adapters.kind import LayerSpec, ParameterSpec
from ..adapters.registry import adapter_kind
from ..frozen.base_gemm import frozen_linear
from ..frozen.plain import PlainWeight
from ..frozen.weight import FrozenWeight
from ..never_compiled import never_compiled
from ..ops.autograd import lora_linear_held
from ..ops.functional import lora_linear_rows
from ..ops.held import HeldAdapters, HeldByNames, hold
from ..routing.route import RouteTensors
from .bank import AdapterBank
from .linear import MultiLoRALinear
from .over_module import OverModule

_KEPT = 2
"""Compositions whose tables of addresses are kept; those of many experts are large."""


class ParameterLayer(OverModule):
    """Keeps a module of the base, for its forward and its settings, with adapters on its own parameters.

    An adapter's Parameters are named after the parameter that they change: `gate_up_proj_lora_A`.
    """

    served = ("lora",)
    base: Any

    def __init__(self, base: nn.Module, **rest: Any) -> None:
        super().__init__(base, **rest)
        self.tables: dict[str, HeldByNames] = {}
        self.frozen = self.frozen_parameter(self.candidates(base)[0])

    @classmethod
    def candidates(cls, module: nn.Module) -> tuple[str, ...]:
        """Returns the parameters that adapters can be put on, in the order in which the class defines them.

        PEFT nests its wrappers in this order. It reorders the parameters themselves when it runs a model.
        """
        raise NotImplementedError

    @classmethod
    def sizes(cls, module: nn.Module, parameter: str) -> tuple[int, int, int]:
        """Returns the number of matrices in a parameter, their d_in and their d_out."""
        raise NotImplementedError

    def frozen_parameter(self, parameter: str) -> FrozenWeight:
        """Returns what tells a parameter's device and dtype."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, module: nn.Module, spec: LayerSpec) -> dict[str, ParameterSpec]:
        return {
            f"{parameter}_{part}": shape
            for parameter, own in spec.parameters
            for part, shape in cls._shapes_of(module, parameter, own).items()
        }

    @classmethod
    def _shapes_of(cls, module: nn.Module, parameter: str, spec: LayerSpec) -> dict[str, ParameterSpec]:
        matrices, d_in, d_out = cls.sizes(module, parameter)
        return adapter_kind(spec.kind).parameters(spec.rank * matrices, d_in, d_out)

    @classmethod
    def peft_keys(cls, module: nn.Module, spec: LayerSpec) -> dict[str, str]:
        """PEFT wraps a module once for each parameter; the wrapper of the last one is the outermost."""
        kind, parameters = adapter_kind(spec.kind), spec.parameters
        return {
            f"{parameter}_{part}": "base_layer." * (len(parameters) - 1 - place) + kind.peft_key(part)
            for place, (parameter, _) in enumerate(parameters)
            for part in kind.parameter_names
        }

    def put(self, name: str, config: Any, spec: LayerSpec, seed: int) -> None:
        self.specs[name] = spec
        for parameter, own in spec.parameters:
            shapes = self._shapes_of(self, parameter, own)
            matrices = {
                part: self.bank(f"{parameter}_{part}", shape).add(name, shape.rows)
                for part, shape in shapes.items()
            }
            for matrix in matrices.values():
                matrix.requires_grad_(not config.inference_mode)
            if not any(matrix.is_meta for matrix in matrices.values()):  # meta: another process's layer
                drawn = (seed + zlib.crc32(parameter.encode())) % (1 << 63)
                adapter_kind(own.kind).initialise(matrices, config, own, drawn, self.frozen)

    def take(self, name: str) -> None:
        for tables in self.tables.values():
            tables.forget()
        super().take(name)

    def parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        return {part: self._bank(part).parameter_of(name) for part in self.peft_keys(self, self.specs[name])}

    def _bank(self, part: str) -> AdapterBank:
        return self._modules[part]  # type: ignore[return-value]

    def matrices_of(self, parameter: str, names: tuple[str, ...]) -> tuple[list[nn.Parameter], ...]:
        """Returns A and B of these adapters on a parameter."""
        banks = self._bank(f"{parameter}_lora_A"), self._bank(f"{parameter}_lora_B")
        return tuple([bank.parameter_of(name) for name in names] for bank in banks)

    def tables_of(self, parameter: str) -> tuple[HeldByNames, int]:
        """Returns where tables of a parameter's adapters are kept, and the count of moves to ask with."""
        banks = self._bank(f"{parameter}_lora_A"), self._bank(f"{parameter}_lora_B")
        kept = self.tables.setdefault(parameter, HeldByNames(_KEPT))
        return kept, self.router.moves + sum(bank.moves for bank in banks)

    def extra_repr(self) -> str:
        adapters = ", ".join(
            f"{name}: {', '.join(f'{parameter} r={own.rank}' for parameter, own in spec.parameters)}"
            for name, spec in self.specs.items()
        )
        return f"of={type(self.base).__name__}, adapters=({adapters})"


_CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type_as)


class MultiLoRAMatrix(ParameterLayer):
    """Runs a module's own forward; where it multiplies rows with its matrix, adapters are added.

    PEFT's `target_parameters` computes with `W + scaling B A`. Here `F.linear(x, W)` inside the module
    becomes `x W^T + scaling_i x A_i^T B_i^T` for the rows of adapter i. A module that uses the matrix in
    another way is refused when it runs. It may have several matrices, and be a linear layer with more than a
    weight and bias.
    """

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        own = any(parameter.dim() == 2 for parameter in module.parameters(recurse=False))
        others = isinstance(module, nn.Embedding | NonDynamicallyQuantizableLinear)
        return isinstance(module, cls) or (own and not others and not MultiLoRALinear.serves(module))

    @classmethod
    def candidates(cls, module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, one in module.named_parameters(recurse=False) if one.dim() == 2)

    @classmethod
    def sizes(cls, module: nn.Module, parameter: str) -> tuple[int, int, int]:
        rows, columns = getattr(module, parameter).shape
        return 1, columns, rows

    def frozen_parameter(self, parameter: str) -> PlainWeight:
        return PlainWeight.named(self._parameters, parameter)

    @never_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; its rows are those of the active route.

        Raises:
            ValueError: if no route says which adapter the rows belong to, the route describes other rows, or
                the module does something else with its matrix than multiplying rows with it.
        """
        if not self.group.adapters:
            return self.base(*args, **kwargs)
        with ExitStack() as stack:
            for parameter in {own for spec in self.specs.values() for own, _ in spec.parameters}:
                weight = self._parameters[parameter]
                assert weight is not None
                product = partial(self._product, parameter)
                stack.enter_context(MatrixInUse(weight, f"{self.name}.{parameter}", product))
            return self.base(*args, **kwargs)

    def _product(self, parameter: str, x: Tensor, weight: Tensor) -> Tensor:
        """Returns `x Wᵀ` with the adapters; `weight` may be cast to another dtype."""
        frozen = PlainWeight.of(weight)
        if self.router.observer is not None:
            return self.router.observer.see(self.name, x, frozen_linear(x, frozen))
        active, place, batch = self.router.tensors_for(self, x)
        specs = {name: dict(self.specs[name].parameters).get(parameter) for name in active.names}
        scalings = {name: spec.scaling for name, spec in specs.items() if spec is not None}
        if not scalings:
            return frozen_linear(x, frozen)
        rows = x if place is None else place.samples_first(x, batch)
        y = self._with_adapters(rows, frozen, parameter, active, scalings)
        return y if place is None else place.as_before(y)

    def _with_adapters(
        self,
        x: Tensor,
        frozen: PlainWeight,
        parameter: str,
        active: RouteTensors,
        scalings: Mapping[str, float],
    ) -> Tensor:
        names = tuple(scalings)
        segments = active.segments if names == active.names else active.subtracted(names)[0]
        values = list(scalings.values())
        scaling = active.keep(
            (parameter, *values), lambda: torch.tensor(values, dtype=self.group.dtype, device=x.device)
        )
        plan = segments, scaling, None, None, None
        if self.router.accumulates and torch.is_grad_enabled():
            held = self._held(parameter, names)
            ys = held and lora_linear_held(x, [frozen], [None], held, plan, self.router.updates)
            if ys:
                return ys[0]
        lora_a, lora_b = self.matrices_of(parameter, names)
        return lora_linear_rows(x, frozen, None, lora_a, lora_b, *plan)

    def _held(self, parameter: str, names: tuple[str, ...]) -> HeldAdapters | None:
        kept, moves = self.tables_of(parameter)

        def make(names: tuple[str, ...]) -> HeldAdapters | None:
            lora_a, lora_b = self.matrices_of(parameter, names)
            return hold(names, lora_a, lora_b, [self.written])

        return kept.get(names, moves, make)


class MatrixInUse(TorchFunctionMode):
    """While a module's forward runs, turns `F.linear` with its matrix into another function.

    Args:
        matrix: `[O, D]`, a parameter of the module.
        named: for messages.
        product: returns `[..., O]` for x `[..., D]` and the matrix, which may be cast.
    """

    def __init__(self, matrix: Tensor, named: str, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._casts, self._named, self._product = [matrix], named, product

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [one for one in (*args, *kwargs.values()) if any(one is other for other in self._casts)]
        if not used:
            return function(*args, **kwargs)
        if function is F.linear and len(args) > 1 and args[1] is used[0]:
            x, matrix, *bias = args
            y, added = self._product(x, matrix), bias[0] if bias else kwargs.get("bias")
            return y if added is None else y + added
        if function in _CASTS:
            self._casts.append(function(*args, **kwargs))
            return self._casts[-1]
        name = getattr(function, "__name__", str(function))
        if name not in ("__get__", "dim", "size"):
            raise ValueError(
                f"layer {self._named}: adapters can be put on a matrix that its module only uses in "
                f"torch.nn.functional.linear, but the module calls {name} on it; remove it from "
                "target_parameters"
            )
        return function(*args, **kwargs)
