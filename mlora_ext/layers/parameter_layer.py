"""A module of the base with adapters on its own parameters."""

from __future__ import annotations

import zlib
from typing import Any

from torch import nn

from ..adapters.kind import LayerSpec, ParameterSpec
from ..adapters.registry import adapter_kind
from ..frozen.weight import FrozenWeight
from ..ops.held import HeldByNames
from .bank import AdapterBank
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
