"""Standard output and standard error that may go away: a closed pipe, a full disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from mlora.errors import RunError


class GuardedStream:
    """A stream that fails once: its failure is told, and what is written afterwards goes nowhere.

    Args:
        stream: a stream of a file, or none where the process was started without one.
        failed: told of the reason; may raise.
    """

    def __init__(self, stream: TextIO | None, failed: Callable[[str], None]) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        self._failed = failed

    def write(self, text: str) -> int:
        """Write text, escaping letters that the stream does not know, or tell that it cannot be written."""
        known = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(known, "backslashreplace").decode(known))
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or tell that it cannot be."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        """All else is the stream's."""
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        # what the stream still holds would fail again when Python ends
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._failed(error.strerror or type(error).__name__)


@contextmanager
def guarded_output(*, goes_on: bool) -> Iterator[None]:
    """Inside, standard output that cannot be written is told of in one line, not by a traceback.

    Args:
        goes_on: say so on standard error and go on, because the work is worth more than its lines.

    Raises:
        RunError: standard output cannot be written, unless ``goes_on``.
    """

    def told(reason: str) -> None:
        line = f"standard output: cannot be written: {reason}"
        if not goes_on:
            raise RunError(line)
        print(f"warning: {line}; the run goes on, and `mlora status` shows it", file=sys.stderr, flush=True)

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
