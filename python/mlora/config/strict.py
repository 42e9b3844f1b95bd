"""The base class of the config models, paths and hub ids, and errors about keys below a validated field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
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


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hugging Face hub id: ``name`` or ``owner/name``."""
    return re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) is not None


def resolve_path(value: str, info: ValidationInfo) -> str:
    """Returns an absolute path; ``~`` is a home folder. ValueError if the system cannot look it up.

    Relative paths start at ``info.context["folder"]``, by default the working directory.
    """
    if "\0" in value:
        raise ValueError(f"{value!r} is not a path: it holds a NUL character")
    try:
        path = (Path((info.context or {}).get("folder", ".")) / Path(value).expanduser()).resolve()
        path.exists()
    except OSError as error:  # a name that is too long, a folder that is closed
        raise ValueError(
            f"{value if len(value) <= 100 else value[:99] + '…'} cannot be reached: {error.strerror}"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{value}: there is no such user's folder") from error
    return str(path)


ResolvedPath = Annotated[str, Field(min_length=1), AfterValidator(resolve_path)]
