"""Optimizers by their names in a config. Imports no torch, so that a config can be read without it.

To add an optimizer, subclass `mlora.optim.optimizer.Optimizer` and register the class.
"""

from __future__ import annotations

from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

Kind = type[Any]
"""A subclass of `mlora.optim.optimizer.Optimizer`."""

TORCH = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimizers of `torch.optim` that step each weight by itself, with a state of tensors."""
_OPTIMIZERS: dict[str, str | Kind] = {
    "adamw_torch": "mlora.optim.adamw:AdamW",
    "adamw_torch_fused": "mlora.optim.adamw:FusedAdamW",
    "adamw_bnb_8bit": "mlora.optim.bitsandbytes_kernels:AdamW8bit",
    "adamw_8bit": "mlora.optim.bitsandbytes_kernels:AdamW8bit",
    "paged_adamw_8bit": "mlora.optim.bitsandbytes_kernels:PagedAdamW8bit",
    "paged_adamw_32bit": "mlora.optim.bitsandbytes_kernels:PagedAdamW32bit",
    "adafactor": "mlora.optim.adafactor:Adafactor",
    "lion_32bit": "mlora.optim.bitsandbytes_kernels:Lion",
    "lion": "mlora.optim.bitsandbytes_kernels:Lion",
    "lion_8bit": "mlora.optim.bitsandbytes_kernels:Lion8bit",
    "paged_lion_32bit": "mlora.optim.bitsandbytes_kernels:PagedLion",
    "paged_lion_8bit": "mlora.optim.bitsandbytes_kernels:PagedLion8bit",
    "lora_fa": "mlora.optim.lora_fa:LoraFA",
    "sgd": "mlora.optim.sgd:Sgd",
    **{f"torch.optim.{name}": f"mlora.optim.torch_optimizer:{name}" for name in TORCH},
}


def register_optimizer(name: str, kind: Kind) -> None:
    """Registers an optimizer under a name for the key `optim`.

    Args:
        name: a name that is not taken.
        kind: the class.

    Raises:
        ValueError: another optimizer has this name.
    """
    if _OPTIMIZERS.get(name, kind) is not kind:
        raise ValueError(f"optim: the name {name!r} is taken; choose another one")
    _OPTIMIZERS[name] = kind


def optimizer_names() -> list[str]:
    """Returns the names of all optimizers."""
    return list(_OPTIMIZERS)


def missing_package(name: str) -> str | None:
    """Returns the package that the optimizer with this name needs and that is not installed."""
    needs = str(_OPTIMIZERS[name]).partition(":")[0] == "mlora.optim.bitsandbytes_kernels"
    return "bitsandbytes" if needs and find_spec("bitsandbytes") is None else None


def optimizer_kind(name: str) -> Kind:
    """Returns the class of the optimizer with this name.

    Raises:
        ValueError: no optimizer has this name.
    """
    if name not in _OPTIMIZERS:
        raise ValueError(f"optim: expected one of {', '.join(_OPTIMIZERS)}, got {name!r}")
    found = _OPTIMIZERS[name]
    return resolve_name(found) if isinstance(found, str) else found
