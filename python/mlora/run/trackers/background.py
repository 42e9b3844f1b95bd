"""Calls a tracker in a thread of its own, so that training never waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from mlora.errors import first_line
from mlora.run.trackers.tracker import Tracker

PATIENCE = 60.0  # seconds that the end of a run waits for what trackers are still to be sent


class _Failures:
    """Keeps what a tracker raised first, in one line; libraries may raise anything."""

    def __init__(self) -> None:
        self.told = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            self.told = self.told or f"{type(error).__name__}: {first_line(error)}"
        return True


class Background:
    """A tracker and its thread. After a failure nothing more is sent."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self._failures = tracker, _Failures()
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

    def wait(self, seconds: float) -> bool:
        """Waits until the thread has ended, for so many seconds at most; returns whether it has."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def give_up(self, reason: str) -> None:
        """Sends nothing more, for this reason."""
        self._failures.told = self._failures.told or reason
