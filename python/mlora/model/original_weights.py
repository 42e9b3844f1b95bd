"""Reads the weights that a quantised base model had before, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from mlora.model.base_info import quantization_of
from mlora.model.checkpoint_tensors import files_of, open_tensors, original_keys
from mlora.model.pretrained import told_in_one_line


def original_weights(
    model: PreTrainedModel, source: str, layers: Iterable[str], stack: ExitStack
) -> Callable[[str], Tensor]:
    """Returns a function that reads a layer's weight; it raises ValueError if there is none.

    Args:
        model: of the same architecture, or a stage's piece of it.
        source: the original model: a folder or a hub id.
        layers: whose weights will be read; only their files are opened.
        stack: closes the files.

    Raises:
        ValueError: the source holds quantised weights or no safetensors, or cannot be read; in one line.
    """
    with told_in_one_line(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    said = quantization_of(source, config)
    if said is not None:
        raise ValueError(quantized_already(source, said["quant_method"]))
    with told_in_one_line(source):
        files = files_of(source, getattr(config, "transformers_weights", None))
        keys = original_keys(model, files, layers)
        tensors = open_tensors(source, keys, files, stack)

    def read(layer: str) -> Tensor:
        if layer not in tensors:
            raise ValueError(f"{source} has no weight of it, or keeps it together with others")
        weight: Tensor = tensors[layer][...]
        return weight

    return read


def quantized_already(source: str, method: str) -> str:
    """Returns why LoftQ does not serve a base model that is stored quantised."""
    return (
        f"init_lora_weights='loftq' needs the original weights, and {source} holds quantised ones only "
        f"({method}); name the original model, and quantise it with quantization: {{method: bnb-nf4}}"
    )
