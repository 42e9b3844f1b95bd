"""The one error that a user of a run sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class RunError(ValueError):
    """Something in a run's config, data or folder is wrong; the message names the thing and what to do.

    The message is one line for each fault, so that a command can print it as it stands.
    """


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, or the error's type when it has none.

    Args:
        error: any exception, for example one of a library whose messages run over many lines.

    Returns:
        One line of text, without the full stop at its end.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(".") if lines else type(error).__name__


def first_fault(error: ValidationError) -> str:
    """Return the first of the faults that pydantic found, such as ``tasks.a.step: is missing``."""
    fault = error.errors()[0]
    message = "is missing" if fault["type"] == "missing" else fault["msg"]
    return ": ".join(part for part in (".".join(map(str, fault["loc"])), message) if part)
