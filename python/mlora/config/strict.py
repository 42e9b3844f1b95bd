"""The base class of the config models, and the errors that their validators raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

MOST = 10**9  # steps, epochs or samples; more is a typing mistake


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and validates defaults too."""

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
    """A fault below a field of plain keys and values; `key` is the dotted path from the field to it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class UnknownKeyError(KeyPathError):
    """A key that no field has; `known` are the keys allowed there."""

    def __init__(self, key: str, known: Sequence[str]) -> None:
        super().__init__(key, f"unknown key; known keys: {', '.join(known)}")
        self.known = known


class KeyPathErrors(ValueError):
    """Several faults (at least one) below a field, so that all of them are reported at once."""

    def __init__(self, faults: Sequence[KeyPathError]) -> None:
        super().__init__("; ".join(f"{fault.key}: {fault}" for fault in faults))
        self.faults = list(faults)


def shown(value: Any) -> str:
    """Returns a value as YAML writes it, cut to 60 characters, for an error."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
