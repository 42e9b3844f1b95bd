"""The errors of this package, and how other libraries' errors become one line."""

from __future__ import annotations

import difflib
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x80-\x9f\u202a-\u202e\u2066-\u2069]")  # and turns of direction


class RunError(ValueError):
    """A fault in a run's config, data or folder. The message names what is wrong and what to do.

    The message has one line for each fault, so that a command can print it unchanged.
    """


class NamedRunError(RunError):
    """A fault of a task or a setting; printed as `what: message`.

    Callers that name it in their own words take `message` alone: see `reason_of`.
    """

    def __init__(self, what: str, message: str) -> None:
        super().__init__(what, message)
        self.what, self.message = what, message

    def __str__(self) -> str:
        return f"{self.what}: {self.message}"


def reason_of(error: ValueError, *names: str) -> str:
    """Returns an error's message without the name of what is at fault, if that is one of these names.

    Errors that have such names are `NamedRunError` and those of `mlora_ext.errors`.
    """
    return error.message if getattr(error, "what", None) in names else str(error)  # type: ignore[attr-defined]


class MemoryLimitError(ValueError):
    """Something does not fit into an engine's memory limit; the message says how much would."""


def check_kind(argument: str, value: Any, expected: str, *kinds: type) -> None:
    """Raises ValueError if an argument is of none of these kinds, which `expected` says in words."""
    no_number = isinstance(value, bool) and bool not in kinds
    no_list = isinstance(value, str | bytes) and str not in kinds
    if not isinstance(value, kinds) or no_number or no_list:
        raise ValueError(f"{argument}: expected {expected}, got {type(value).__name__}")


def check_kinds(*arguments: tuple[Any, ...]) -> None:
    """Does `check_kind` for several arguments."""
    for one in arguments:
        check_kind(*one)


UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    ImportError,
    pickle.PickleError,
)
"""What libraries raise for a stranger's file that they cannot read: a config may hold anything anywhere."""


class RustTold(AbstractContextManager[None]):
    """Inside `with`, what `tokenizers` raises becomes a RunError: a bare Exception, or a panic.

    A panic of a library in Rust is no Exception.

    Args:
        what: begins the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            assert error is not None
            raise RunError(f"{self._what}: {first_line(error)}") from error


def spelt_alike(word: str, words: Sequence[str], alike: float = 0.6) -> str | None:
    """Returns the most similarly spelt of `words`, or None if no similarity reaches `alike` (0 to 1)."""
    by_case = {each.lower(): each for each in words}
    found = difflib.get_close_matches(word.lower(), list(by_case), n=1, cutoff=alike)
    return by_case[found[0]] if found else None


def unknown_option(key: str, known: Sequence[str]) -> str:
    """Returns the end of a line on an unknown option: which known one may be meant, or all of them."""
    found = spelt_alike(key, known)
    return f"did you mean {found!r}?" if found else f"its options: {', '.join(known) or 'none'}"


def literals(fault: Any) -> list[str]:
    """Returns the texts that one of pydantic's errors of the type ``literal_error`` expected."""
    return re.findall("'([^']*)'", fault["ctx"]["expected"])


def unknown_value(value: str, known: Sequence[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Returns the message for a value that is none of `known`: which one may be meant, or all of them.

    `elsewhere` holds other tools' names, and which of `known` each of them is.
    """
    others = elsewhere or {}
    found = spelt_alike(value, [*known, *others])
    if found is None:
        text = repr(value) if len(value) <= 60 else f"{value[:59]!r}…"
        return f"must be one of {', '.join(known[:-1])} or {known[-1]}, got {text}"
    return f"{value!r} is unknown; did you mean {others.get(found, found)!r}?"


def first_line(error: BaseException | str) -> str:
    """Returns the first non-empty line of the message without its full stop, else the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removesuffix(".") if lines else type(error).__name__


def visible(text: str) -> str:
    """Returns text with control characters escaped, which would steer a terminal; not lines and tabs."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def file_line(error: OSError) -> str:
    """Returns a system's error about a file in one line: the file, then what happened."""
    return f"{error.filename}: {error.strerror}" if error.filename else first_line(error)


def first_fault(error: ValidationError) -> str:
    """Returns the first fault that pydantic found, for example ``tasks.a.step: is missing``."""
    fault = error.errors()[0]
    message = "is missing" if fault["type"] == "missing" else fault["msg"]
    if fault["type"] == "value_error":
        message = str(fault["ctx"]["error"])
    return ": ".join(part for part in (".".join(map(str, fault["loc"])), message) if part)
