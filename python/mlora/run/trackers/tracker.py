"""What a tracker does; each library has a file with a class of its own beside this one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackedGroup:
    """What the tracking runs of a run share.

    Args:
        name: of the group, ``run_name``.
        project: None leaves it to the library's own settings.
        logging_dir: where files of TensorBoard go.
    """

    name: str
    project: str | None
    logging_dir: Path


class Tracker:
    """Sends values to one library: a tracking run for each adapter, all of them in one group.

    It is made before training, and what it raises then refuses the run. Its methods are called later, all in
    one thread of their own. They may raise anything: then nothing more is sent, and training goes on.

    Attributes:
        place: where the values are to be found, for people.
    """

    place: str

    def go_on(self, known: Collection[str]) -> None:
        """Tells the ids of the tracking runs that an earlier part of the run has begun."""

    def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
        """Begins an adapter's tracking run, or goes on with the `known` one; returns its id."""
        raise NotImplementedError

    def log(self, adapter: str, values: Mapping[str, float], step: int) -> None:
        """Sends values after `step` optimizer steps; the keys are those of Trainer's logs."""
        raise NotImplementedError

    def end(self, adapter: str, state: str) -> None:
        """Ends an adapter's tracking run; `state` is that of `Progress`, or ``interrupted``."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what the group itself has; all adapters have ended."""
