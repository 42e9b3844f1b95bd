"""Paths and hub ids in a config. Relative paths start at the config file's folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hugging Face hub id: ``name`` or ``owner/name``."""
    return HUB_ID.fullmatch(name) is not None


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
