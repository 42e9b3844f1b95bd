"""Tensors of a safetensors file, read by name in pieces."""

import json
import struct
from pathlib import Path

import pytest
import torch
from mlora.model import tensor_file
from mlora.model.tensor_file import TensorFile
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

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
