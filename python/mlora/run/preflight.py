"""What can be refused before a run's processes are started, and torch with them."""

from __future__ import annotations

import json
from pathlib import Path

from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.files.run_folder import RunFolder


def check_blocks(config: RunConfig, blocks: int) -> None:
    """Check that a model can be cut as a run's config says.

    Args:
        config: the run's.
        blocks: how many decoder blocks its base model has.

    Raises:
        RunError: there are more stages, or the partition adds up to another number.
    """
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


def check_early(config: RunConfig, *, overwrite: bool) -> None:
    """Check what needs neither torch nor Transformers; the processes check everything again.

    Args:
        config: of a new run over several processes.
        overwrite: an earlier run may be replaced.

    Raises:
        RunError: the output folder is not free, or the model cannot be cut as the config says.
    """
    RunFolder(config.output_dir).check_free(overwrite=overwrite, inputs=config.inputs)
    blocks = _peek_blocks(Path(config.base_model) / "config.json")
    if blocks is not None:
        check_blocks(config, blocks)


def _peek_blocks(path: Path) -> int | None:
    """The number of decoder blocks, where the file says it under the usual name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # a hub id, or something that is told of later
    if not isinstance(content, dict):
        return None
    text = content.get("text_config")
    found = (text if isinstance(text, dict) else content).get("num_hidden_layers")
    return found if isinstance(found, int) else None
