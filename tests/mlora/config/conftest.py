from pathlib import Path

import pytest


@pytest.fixture
def base(tmp_path: Path) -> dict:
    (tmp_path / "model").mkdir()
    return {
        "base_model": "model",
        "output_dir": "runs/one",
        "defaults": {"max_steps": 10, "learning_rate": 1e-3},
        "datasets": [{"name": "d", "path": "d.jsonl", "format": "tokens"}],
        "adapters": [
            {"name": "a", "dataset": "d", "lora": {"r": 4}},
            {
                "name": "b",
                "dataset": "d",
                "learning_rate": 5e-4,
                "lora": {"r": 7, "target_modules": ["q_proj"]},
            },
        ],
    }
