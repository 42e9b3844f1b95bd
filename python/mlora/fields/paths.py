"""Paths in a config: relative ones resolve against the folder of the file in which they stand."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationInfo


def resolve_path(value: str, info: ValidationInfo) -> str:
    """Return an absolute path.

    Args:
        value: as it stands in the config; `~` is a home folder.
        info: its context names the `folder`; default: where the process is.

    Raises:
        ValueError: the place cannot be reached.
    """
    if "\0" in value:
        raise ValueError(f"{value!r} is no path: it holds a NUL character")
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
