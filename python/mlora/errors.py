"""The errors of this package, and how other libraries' errors become one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class RunError(ValueError):
    """A fault in a run's config, data or folder. The message names what is wrong and what to do.

    The message has one line for each fault, so that a command can print it unchanged.
    """


class MemoryLimitError(ValueError):
    """Something does not fit into an engine's memory limit; the message says how much would."""


def first_line(error: BaseException) -> str:
    """Returns the first non-empty line of the message without its full stop, else the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(".") if lines else type(error).__name__


def file_line(error: OSError) -> str:
    """Returns a system's error about a file in one line: the file, then what happened."""
    return f"{error.filename}: {error.strerror}" if error.filename else first_line(error)


def first_fault(error: ValidationError) -> str:
    """Returns the first fault that pydantic found, for example ``tasks.a.step: is missing``."""
    fault = error.errors()[0]
    message = "is missing" if fault["type"] == "missing" else fault["msg"]
    return ": ".join(part for part in (".".join(map(str, fault["loc"])), message) if part)
