"""The base class of the config models, and errors about keys below a validated field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails

MOST = 10**9  # steps, epochs or samples; more is a typing mistake

Location = tuple[int | str, ...]
"""The path from a model to a value in it: keys of mappings and indices of lists."""


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


def wrong_keys(messages: Mapping[Location, str]) -> ValidationError:
    """Returns an error for a validator to raise: messages by the path from what it validates."""
    return ValidationError.from_exception_data(
        "config",
        [
            InitErrorDetails(type="value_error", loc=at, input=None, ctx={"error": ValueError(message)})
            for at, message in messages.items()
        ],
    )


def wrong_key(path: str, message: str) -> ValidationError:
    """Returns `wrong_keys` of one key, whose path is written with dots."""
    return wrong_keys({tuple(path.split(".")) if path else (): message})


def shown(value: Any) -> str:
    """Returns a value as YAML writes it, cut to 60 characters, for an error."""
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
