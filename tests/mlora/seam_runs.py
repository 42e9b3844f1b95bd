"""What each seam's test does with its toy implementation: train whole, train again with an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlora
from mlora.config.config_file import resolve_config
from mlora.run.run import resume

from tests.mlora.limited_runs import Watching, interrupt
from tests.mlora.stage_runs import by_adapter
from tests.mlora.tiny_run import run_data, weights

STAGES = [1, 2]


def data_of(base: Path, folder: Path, stages: int, **fields: Any) -> dict[str, Any]:
    """Two adapters; the first one has the fields of a toy implementation, the second one has not."""
    data = run_data(base, folder, pipeline={"stages": stages})
    data["adapters"][0] |= fields
    return data


def train_and_resume(data: dict[str, Any], folder: Path) -> Path:
    """Returns the folder of a run that an interrupted and resumed one equals, bit for bit."""
    whole, cut = folder / "whole", folder / "cut"
    result = mlora.train(resolve_config(data | {"output_dir": str(whole)}, folder=folder))
    assert result.status == "finished", result
    told = Watching({("first", 3): interrupt})
    result = mlora.train(resolve_config(data | {"output_dir": str(cut)}, folder=folder), reporter=told)
    assert result.status == "interrupted", told.lines
    assert list((cut / "checkpoints").glob("step-*.pt"))
    assert resume(cut).status == "finished"
    assert by_adapter(cut) == by_adapter(whole)  # a signal lets evaluations wait for other groups' steps
    assert weights(cut) == weights(whole)
    return whole
