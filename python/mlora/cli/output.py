"""Guards standard output and standard error, which may go away: a closed pipe, a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from mlora.errors import RunError, visible


class GuardedStream:
    """A stream that fails once: it passes the reason to `failed` and discards all later text.

    `stream` is None in a process that was started without it. `failed` may raise. With `escapes`, no text can
    steer the terminal; `raw` is for what draws on it.
    """

    def __init__(
        self, stream: TextIO | None, failed: Callable[[str], None], *, escapes: bool = False
    ) -> None:
        self.raw = GuardedStream(stream, failed) if escapes else self
        self._escapes = escapes
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        self._failed = failed

    def write(self, text: str) -> int:
        """Writes text; escapes control characters if asked to, and characters that the encoding lacks."""
        text = visible(text) if self._escapes else text
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


def terminal() -> TextIO:
    """Returns standard output for what draws on a terminal; the text that it draws must be `visible`."""
    return cast(TextIO, getattr(sys.stdout, "raw", sys.stdout))


@contextmanager
def guarded_output(*, goes_on: bool) -> Iterator[None]:
    """Reports standard output that cannot be written in one line, not by a traceback.

    With `goes_on` the line is a warning and the work goes on, because it is worth more than its output.
    Otherwise raises RunError, and nothing that is printed can steer the terminal; code of users, which runs
    in commands that go on, may do so.
    """

    def told(reason: str) -> None:
        line = f"standard output: cannot be written: {reason}"
        if not goes_on:
            raise RunError(line)
        print(f"warning: {line}; the run continues, and `mlora status` shows it", file=sys.stderr, flush=True)

    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, GuardedStream(sys.stderr, lambda reason: None, escapes=not goes_on))
    sys.stdout = cast(TextIO, GuardedStream(sys.stdout, told, escapes=not goes_on))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before
