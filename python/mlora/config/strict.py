"""The base of all models of a config, and the faults that its validators report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

MOST = 10**9  # steps, epochs or samples: more is a slip of the hand


class Strict(BaseModel):
    """Keys that are not known are refused, and defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and kinds & {int, float} and not kinds & {bool, str}:
            raise ValueError(f"must be a number, got {shown(value)}")
        return value


class KeyPathError(ValueError):
    """A fault below a field that holds plain keys and values.

    Attributes:
        key: the keys that lead from the field to the fault, joined by dots.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class UnknownKeyError(KeyPathError):
    """A key that no field has.

    Attributes:
        known: the keys that may stand there.
    """

    def __init__(self, key: str, known: Sequence[str]) -> None:
        super().__init__(key, f"unknown key; known keys: {', '.join(known)}")
        self.known = known


class KeyPathErrors(ValueError):
    """Several faults below a field, so that all of them are reported at once.

    Attributes:
        faults: at least one.
    """

    def __init__(self, faults: Sequence[KeyPathError]) -> None:
        super().__init__("; ".join(f"{fault.key}: {fault}" for fault in faults))
        self.faults = list(faults)


def shown(value: Any) -> str:
    """Return a value as an error shows it: as YAML writes it, and cut where it is long."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
