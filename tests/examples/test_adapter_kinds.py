"""The example with several kinds of adapters trains, and each of its folders loads."""

from pathlib import Path

import make_tasks
import mlora
from mlora.config.config_file import load_config
from safetensors.torch import load_file

EXAMPLE = Path(make_tasks.__file__).parent / "adapter_kinds.yaml"


def test_the_example_trains(tmp_path: Path) -> None:
    short = [
        f"output_dir={tmp_path / 'run'}",
        "defaults.max_steps=2",
        "defaults.per_device_train_batch_size=2",
    ]
    result = mlora.train(load_config(EXAMPLE, short))
    assert result.status == "finished", result
    parts = {"dora": "lora_magnitude_vector", "with-bias": "lora_B.bias", "plain": "lora_B.weight"}
    for name, part in parts.items():
        tensors = load_file(tmp_path / "run" / "adapters" / name / "adapter_model.safetensors")
        assert any(key.endswith(part) for key in tensors), name
