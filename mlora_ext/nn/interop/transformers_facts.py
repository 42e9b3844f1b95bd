"""Attributes in which Transformers and PEFT's helpers look up a model's adapters."""

from __future__ import annotations

from torch import nn

from ..routing.router import router_of

FACTS = ("peft_config", "_hf_peft_config_loaded")


def refresh(model: nn.Module) -> None:
    """Updates these attributes after adapters were added or removed, if the model has the interface."""
    if "set_adapter" not in model.__dict__:
        return
    adapters = router_of(model).adapters
    model.__dict__["peft_config"] = {name: info.config for name, info in adapters.items()}
    model.__dict__["_hf_peft_config_loaded"] = bool(adapters)
