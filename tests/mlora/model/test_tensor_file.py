"""Tensors and weights of single layers in a checkpoint's files, read by name."""

from __future__ import annotations

import copy
import json
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from mlora.model import tensor_file
from mlora.model.original_weights import original_weights
from mlora.model.tensor_file import TensorFile
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import mlora_ext as mx
from mlora_ext.targets.find import linear_layers
from tests.mixtures import mixture
from tests.mlora.tiny_models import make

KINDS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize(("piece", "large"), [(1 << 20, 1 << 20), (7, 1)])
def test_every_dtype_and_shape(
    piece: int, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE", piece)
    monkeypatch.setattr(tensor_file, "_LARGE", large)
    tensors = {str(dtype): torch.arange(-6, 9).reshape(3, 5).to(dtype) for dtype in KINDS}
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "a.safetensors", {"made": "here"})
    expected = load_file(tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        assert set(file.keys()) == set(tensors)
        found = {key: file.read(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert found[key].contiguous().view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))
        found[key].zero_()  # the memory is its own


def test_a_file_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.ones(100)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(SafetensorError):
        TensorFile(path)
    path.write_bytes(whole)
    with TensorFile(path) as file:
        path.write_bytes(whole[:-4])  # while it is open
        with pytest.raises(OSError, match=r"a.safetensors: ends before w does"):
            file.read("w")


def test_a_dtype_that_torch_lacks(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"ab")
    with TensorFile(path) as file, pytest.raises(ValueError, match="w: torch has no dtype F8_E8M0"):
        file.read("w")


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
