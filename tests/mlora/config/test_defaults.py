"""What ``defaults`` fill in: an adapter's own ``num_train_epochs`` comes before their ``max_steps``."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from mlora.config.config_file import dump_config, resolve_config
from mlora.config.defaults import with_defaults

CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 10),
    ({"num_train_epochs": 2}, -1),
    ({"num_train_epochs": 2, "max_steps": 5}, 5),
    ({"num_train_epochs": 2, "max_steps": -1}, -1),
    ({"max_steps": 7}, 7),
]


@pytest.mark.parametrize(("own", "steps"), CASES)
def test_an_adapters_own_epochs_come_before_steps_of_the_defaults(
    tmp_path: Path, own: dict[str, Any], steps: int
) -> None:
    data = {
        "base_model": "owner/model",
        "output_dir": "out",
        "defaults": {"max_steps": 10, "num_train_epochs": 4},
        "datasets": [{"name": "d", "path": "d.jsonl", "format": "tokens"}],
        "adapters": [{"name": "a", "dataset": "d", "lora": {}, **own}],
    }
    config = resolve_config(data, folder=tmp_path)
    assert config.adapters[0].max_steps == steps
    assert config.adapters[0].num_train_epochs == own.get("num_train_epochs", 4)
    written = dump_config(config)  # what a resumed run reads
    again = resolve_config(yaml.safe_load(written), folder=tmp_path)
    assert again == config
    assert dump_config(again) == written


def test_epochs_that_a_sweep_searches_come_before_steps_of_the_defaults() -> None:
    defaults = {"max_steps": 10, "num_train_epochs": 4}
    assert with_defaults(defaults, {}, ["num_train_epochs"])["max_steps"] == -1
    assert with_defaults(defaults, {"max_steps": 3}, ["num_train_epochs"])["max_steps"] == 3
    assert with_defaults(defaults, {}, ["num_train_epochs", "max_steps"])["max_steps"] == 10
