"""Checks that need no torch and are made before a run's processes start."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.store.run_folder import RunFolder


def check_blocks(config: RunConfig, blocks: int) -> None:
    """Raises RunError if the base model's decoder blocks cannot be cut into stages as the config says."""
    pipeline = config.pipeline
    if pipeline.stages > 1 and pipeline.stages > blocks:
        raise RunError(
            f"pipeline.stages: is {pipeline.stages}, but {config.base_model} has {blocks} decoder blocks"
        )
    if pipeline.partition and sum(pipeline.partition) != blocks:
        raise RunError(
            f"pipeline.partition: {pipeline.partition} adds up to {sum(pipeline.partition)}, but "
            f"{config.base_model} has {blocks} decoder blocks"
        )


def check_folders(config: RunConfig) -> None:
    """Raises RunError if a folder for scratch files is missing or cannot be written."""
    for index, folder in enumerate(config.offload.folders):
        key = f"offload.folders[{index}]"
        if not Path(folder).is_dir():
            raise RunError(f"{key}: no such folder: {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RunError(f"{key}: {folder} cannot be written")


def check_early(config: RunConfig, *, overwrite: bool) -> None:
    """Checks the folders and the stages of a new run; its processes check everything again."""
    RunFolder(config.output_dir).check_free(overwrite=overwrite, inputs=config.inputs)
    check_folders(config)
    blocks = _peek_blocks(Path(config.base_model) / "config.json")
    if blocks is not None:
        check_blocks(config, blocks)


def _peek_blocks(path: Path) -> int | None:
    """Returns the number of decoder blocks, or None if the file does not hold it under the usual name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a hub id, or a fault that is reported later
    if not isinstance(content, dict):
        return None
    text = content.get("text_config")
    found = (text if isinstance(text, dict) else content).get("num_hidden_layers")
    return found if isinstance(found, int) else None
