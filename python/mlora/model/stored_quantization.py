"""Writes and reads the `quantization.json` of a run's adapters; its keys are those of `quantization`.

PEFT's config names the base model, and has no place for this.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlora.config.sections import QuantizationConfig
from mlora.durable import write_whole
from mlora.errors import first_fault, first_line
from mlora_ext.interop.side_files import QUANTIZATION


def write_quantization(folder: str | os.PathLike[str], chosen: QuantizationConfig) -> None:
    """Writes the file durably."""
    text = json.dumps(chosen.model_dump(exclude_defaults=True)) + "\n"
    write_whole(Path(folder) / QUANTIZATION, text.encode())


def read_quantization(folder: Path) -> dict[str, Any] | None:
    """Returns what the file holds, checked; None if there is no file. ValueError names the file."""
    path = folder / QUANTIZATION
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return QuantizationConfig.model_validate(stored).model_dump(exclude_defaults=True)
    except ValueError as error:
        reason = first_fault(error) if isinstance(error, ValidationError) else first_line(error)
        raise ValueError(f"{path}: is not as a run writes it: {reason}") from error
