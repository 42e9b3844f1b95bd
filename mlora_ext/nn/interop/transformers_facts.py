"""What Transformers and PEFT's helpers read on a model to see its adapters."""

from __future__ import annotations

from torch import nn

from ..routing.router import router_of

FACTS = ("peft_config", "_hf_peft_config_loaded")


def refresh(model: nn.Module) -> None:
    """Writes the model's adapters down where Transformers looks, after some have joined or left.

    Args:
        model: converted; one without the adapter interface is left alone.
    """
    if "set_adapter" not in model.__dict__:
        return
    adapters = router_of(model).adapters
    model.__dict__["peft_config"] = {name: info.config for name, info in adapters.items()}
    model.__dict__["_hf_peft_config_loaded"] = bool(adapters)
