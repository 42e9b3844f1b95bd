"""Writes configs, and returns the lines that refuse them."""

from pathlib import Path

import pytest
import yaml
from mlora.config.config_file import resolve_config
from mlora.errors import RunError


def write(folder: Path, data: dict) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def lines_of(folder: Path, data: dict) -> list[str]:
    with pytest.raises(RunError) as error:
        resolve_config(data, folder=folder, where="run.yaml")
    return str(error.value).splitlines()
