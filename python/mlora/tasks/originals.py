"""Checks that a run has the original weights of its quantised base, where an adapter begins from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.model.original_weights import quantized_already
from mlora_ext.adapters.lora_config import needs_weights

if TYPE_CHECKING:
    from peft import LoraConfig


def check_originals(lora: LoraConfig, config: RunConfig, base: BaseInfo) -> None:
    """Raises RunError for LoftQ over a base that is plain, or that is stored quantised."""
    if not needs_weights(lora):
        return
    if base.quantization is not None:
        raise RunError(f"lora: {quantized_already(base.name, base.quantization['quant_method'])}")
    if config.quantization is None:
        raise RunError(
            "lora: init_lora_weights='loftq' needs a quantised base: over a plain one it would replace "
            "weights that all adapters share; add quantization: {method: bnb-nf4}, or use 'pissa'"
        )
