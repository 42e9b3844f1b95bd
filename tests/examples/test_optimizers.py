"""The example of several optimizers trains, each in a mixed batch with the others."""

from pathlib import Path

import make_tasks
import mlora
import pytest
from mlora.config.config_file import load_config

pytestmark = pytest.mark.peers
EXAMPLE = Path(make_tasks.__file__).parent / "optimizers.yaml"


def test_it_trains(tmp_path: Path) -> None:
    config = load_config(EXAMPLE, ["defaults.max_steps=2", f"output_dir={tmp_path}/run", "device=cpu"])
    result = mlora.train(config)
    assert {name: done.state for name, done in result.adapters.items()} == dict.fromkeys(
        ("plain", "eight", "plus", "factored", "lion", "frozen-a"), "finished"
    )
