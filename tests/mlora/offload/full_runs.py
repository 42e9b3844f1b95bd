"""Runs with `method: full` for tests: one task that trains all weights of a tiny model."""

from pathlib import Path
from typing import Any

import torch
from mlora.config.config_file import resolve_config
from mlora.run.run import train
from safetensors.torch import load_file

from tests.mlora.tiny_run import lines, run_data

BLOCKS = 4
ON_DISK: dict[str, Any] = {"base": "disk", "optimizer": "disk", "slots": 2}


def full_data(base: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of one task with accumulation and evaluation."""
    folder.mkdir(exist_ok=True)
    data = run_data(base, folder, method="full", bf16=True)
    own = data["adapters"][0]
    del own["lora"]
    own |= {"name": "all", "max_grad_norm": 0.0}
    data["adapters"] = [own]
    return data | changes


def run_of(data: dict[str, Any], folder: Path, reporter: Any = None) -> Path:
    assert train(resolve_config(data, folder=folder), reporter=reporter).exit_code == 0
    return folder / "run"


def model_of(run: Path) -> dict[str, torch.Tensor]:
    """The trained weights."""
    folder = run / "adapters" / "all"
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    found, expected = model_of(one), model_of(other)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
