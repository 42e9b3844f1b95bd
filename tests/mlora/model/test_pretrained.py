"""Models that are refused by their config alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.model.pretrained import load_whole, skeleton


@pytest.mark.parametrize("load", [load_whole, skeleton])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_quantized_models(
    load: Callable[[str, torch.dtype], Any], field: str, tiny_base: Path, tmp_path: Path
) -> None:
    """Before a weight is read: there is none in this folder."""
    config = json.loads((tiny_base / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {field: {"quant_method": "compressed-tensors"}})
    )
    with pytest.raises(
        ValueError,
        match=r"^base_model: .* is quantized \(compressed-tensors\), .* Transformers reads it with comp",
    ):
        load(str(tmp_path), torch.float32)
