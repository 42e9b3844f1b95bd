"""Guards standard output and standard error, which may go away: a closed pipe, a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from mlora.errors import RunError


class GuardedStream:
    """A stream that fails once: it passes the reason to `failed` and discards all later text.

    `stream` is None in a process that was started without it. `failed` may raise.
    """

    def __init__(self, stream: TextIO | None, failed: Callable[[str], None]) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        self._failed = failed

    def write(self, text: str) -> int:
        """Writes text and escapes characters that the stream's encoding lacks."""
        known = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(known, "backslashreplace").decode(known))
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        """Returns the stream's attribute."""
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        # else the text in the stream's buffer would fail again when Python exits
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._failed(error.strerror or type(error).__name__)


@contextmanager
def guarded_output(*, goes_on: bool) -> Iterator[None]:
    """Reports standard output that cannot be written in one line, not by a traceback.

    With `goes_on` the line is a warning and the work goes on, because it is worth more than its output.
    Otherwise raises RunError.
    """

    def told(reason: str) -> None:
        line = f"standard output: cannot be written: {reason}"
        if not goes_on:
            raise RunError(line)
        print(f"warning: {line}; the run continues, and `mlora status` shows it", file=sys.stderr, flush=True)

    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, GuardedStream(sys.stderr, lambda reason: None))
    sys.stdout = cast(TextIO, GuardedStream(sys.stdout, told))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before
