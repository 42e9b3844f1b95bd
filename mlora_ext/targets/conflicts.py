"""Refuses adapters that want different things of one module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..adapters.kind import LayerSpec
from ..adapters.trained_parts import TRAINED_COPY
from ..errors import AdapterError
from ..layers.adapter_layer import AdapterLayer
from ..layers.layer_kinds import layer_kind

_WHAT = {"trained_copy": "trains a copy of it", "trained_rows": "trains rows of it"}


def refuse_conflicts(model: nn.Module, plans: Mapping[str, Mapping[str, LayerSpec]]) -> None:
    """Raises ValueError, naming both adapters, if one module cannot serve all of the model's and these."""
    users: dict[str, dict[str, LayerSpec]] = {
        key: dict(module.specs) for key, module in model.named_modules() if isinstance(module, AdapterLayer)
    }
    for name, plan in plans.items():
        for key, spec in plan.items():
            users.setdefault(key, {})[name] = spec
    copied = {
        key: name for key, specs in users.items() for name, spec in specs.items() if spec.kind == TRAINED_COPY
    }
    for key, specs in users.items():
        _check_one(model, key, specs)
        for outer, name in copied.items():
            if key.startswith(f"{outer}.") and specs:
                other = next(iter(specs))
                raise AdapterError(
                    other,
                    f"layer {key} lies inside {outer}, of which adapter {name!r} trains a "
                    f"copy (modules_to_save); leave {key} out of {other!r}, for example by exclude_modules",
                )


def _check_one(model: nn.Module, key: str, specs: Mapping[str, LayerSpec]) -> None:
    """Raises ValueError if adapters of one module need layers of different classes."""
    first: tuple[str, LayerSpec] | None = None
    for name, spec in specs.items():
        if first is None:
            first = name, spec
            continue
        module = model.get_submodule(key)
        if layer_kind(module, spec.kind) is not layer_kind(module, first[1].kind):
            says = [_WHAT.get(one.kind, "has low-rank parts on it") for one in (first[1], spec)]
            raise ValueError(
                f"layer {key}: adapter {first[0]!r} {says[0]} and adapter {name!r} {says[1]}; one module "
                "serves one of both: leave it out of one of the adapters"
            )
