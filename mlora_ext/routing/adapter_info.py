"""What a model knows of an adapter beside its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..adapters.lora_config import needs_weights
from ..errors import AdapterError


@dataclass(eq=False)
class AdapterInfo:
    """What a model knows of an adapter beside its layers.

    Attributes:
        config: PEFT's, as it was given.
        seed: of its dropout.
        start_seed: of its initial values, together with its name and a layer's.
        awaits_start: whether `mlora_ext.initialise_from_data` (for LoftQ `initialise_from_weights`) must be
            called before it can be used.
    """

    config: Any
    seed: int
    start_seed: int = 0
    awaits_start: bool = False

    def check_started(self, name: str) -> None:
        """Raises ValueError with what must be called before the adapter of this name can be used."""
        if not self.awaits_start:
            return
        needs, function, argument, key = "the adapter's data", "data", "batches", "start_batches"
        if needs_weights(self.config):
            needs, function, argument, key = "the original weights", "weights", "folder", "start_weights"
        raise AdapterError(
            name,
            f"init_lora_weights={self.config.init_lora_weights!r} needs {needs}; call "
            f"mlora_ext.initialise_from_{function}(model, {name!r}, {argument}) first; an Engine takes "
            f"create_adapter({key}=...)",
        )
