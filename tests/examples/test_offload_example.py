"""The example of a base on disk: it trains as in memory, bit for bit."""

from pathlib import Path

import make_tasks
import mlora
import pytest
from mlora.config.config_file import load_config
from safetensors.torch import load_file

EXAMPLE = Path(make_tasks.__file__).parent / "offload.yaml"


def train(folder: Path, *changes: str) -> dict[str, bytes]:
    """The adapters' weights after three short steps."""
    short = [f"output_dir={folder}", "defaults.max_steps=3", "defaults.per_device_train_batch_size=2"]
    result = mlora.train(load_config(EXAMPLE, [*short, "base_gemm=aten", *changes]))
    assert result.status == "finished", result
    return {
        f"{name} {key}": value.numpy().tobytes()
        for name in result.adapters
        for key, value in load_file(folder / "adapters" / name / "adapter_model.safetensors").items()
    }


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return train(tmp_path_factory.mktemp("disk") / "run")


def test_the_example_trains_as_in_memory(on_disk: dict[str, bytes], tmp_path: Path) -> None:
    assert load_config(EXAMPLE).offload.base == "disk"
    kept = train(tmp_path / "run", "offload={base: device}")
    assert len(kept) > 20
    assert on_disk == kept
