"""The base of all models of a config."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MOST = 10**9  # steps, epochs or samples: more is a slip of the hand


class Strict(BaseModel):
    """Keys that are not known are refused, and defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class KeyPathError(ValueError):
    """A fault below a field that holds plain keys and values.

    Attributes:
        key: the keys that lead from the field to the fault, joined by dots.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
