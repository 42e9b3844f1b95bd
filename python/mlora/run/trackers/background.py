"""Calls a tracker in a thread of its own, so that training never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from mlora.errors import first_line
from mlora.run.trackers.tracker import Tracker

PATIENCE = 60.0  # seconds that the end of a run waits for what is still to be sent


class _Failures:
    """Keeps what a tracker raised first, in one line; libraries may raise anything."""

    def __init__(self) -> None:
        self.told = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception):
            self.told = self.told or f"{type(error).__name__}: {first_line(error)}"
        return isinstance(error, Exception)


class Background:
    """A tracker and its thread. After a failure nothing more is sent.

    Args:
        patience: seconds that `close` waits.
    """

    def __init__(self, tracker: Tracker, patience: float = PATIENCE) -> None:
        self.tracker = tracker
        self._patience, self._failures = patience, _Failures()
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str:
        """Why nothing is sent any more; empty while all is well."""
        return self._failures.told

    def tell(self, call: Callable[[], object]) -> None:
        """Adds a call to those that the thread makes, one after the other."""
        self._calls.put(call)

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            if not self.fault:
                with self._failures:
                    call()

    def stop(self) -> None:
        """Ends the thread once it has made all calls."""
        self._calls.put(None)

    def close(self) -> None:
        """Waits until all calls are made, or for the time of `patience`."""
        self.stop()
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._failures.told = f"did not take all values within {self._patience:g} s"
