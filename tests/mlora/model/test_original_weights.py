"""Weights of single layers in a checkpoint, by the names that a converted model has for its layers."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from mlora.model.original_weights import original_weights
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import mlora_ext as mx
from mlora_ext.targets.find import linear_layers
from tests.mixtures import mixture
from tests.mlora.tiny_models import make

FAMILIES = ["llama", "gpt2", "phi3", "mixtral"]


def saved(family: str, folder: Path) -> PreTrainedModel:
    """A model in several files; GPT-2's without the prefix of its body, as on the hub."""
    model = mixture("mixtral") if family == "mixtral" else make(family)
    part = model.transformer if family == "gpt2" else model
    part.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_found_under_its_own_name(family: str, tmp_path: Path) -> None:
    base = saved(family, tmp_path)
    model = mx.convert_model(copy.deepcopy(base), {}, every_linear=True)
    layers = [key for key in linear_layers(model) if not key.endswith("lm_head")]
    assert len(layers) >= 8
    with ExitStack() as stack:
        read = original_weights(model, str(tmp_path), layers, stack)
        for key in layers:
            assert torch.equal(read(key), base.get_submodule(key).weight), key
        with pytest.raises(ValueError, match=f"^{tmp_path} has no weight of it, or keeps it together with"):
            read("model.norm")


def test_one_file_with_the_names_of_the_body(tmp_path: Path) -> None:
    base = make("llama")
    base.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({key.removeprefix("model."): t for key, t in tensors.items()}, tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.down_proj"
    with ExitStack() as stack:
        read = original_weights(base, str(tmp_path), [key], stack)
        assert torch.equal(read(key), base.get_submodule(key).weight)
