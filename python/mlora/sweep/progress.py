"""How far a sweep has come, from the files of its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlora.config.sweep_config import SweepConfig
from mlora.files.run_folder import RunFolder
from mlora.sweep.ranking import RankedTrial, rank_trials, shown


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep has come.

    Attributes:
        begun: trials that have begun.
        count: trials that there will be.
        best: the best of those that have finished; None before there is one.
    """

    begun: int
    count: int
    metric: str
    best: RankedTrial | None

    @property
    def line(self) -> str:
        """One line for the user."""
        found = f"sweep: {self.begun} of {self.count} trials begun"
        if self.best is None:
            return f"{found}, none has finished"
        params = ", ".join(f"{path} {shown(value)}" for path, value in self.best.params.items())
        return f"{found}; best so far {self.best.name}, {self.metric} {self.best.value:.4g}: {params}"

    def as_json(self) -> dict[str, Any]:
        """Returns the same for scripts, as plain values."""
        best = self.best and {
            "trial": self.best.name,
            self.metric: self.best.value,
            "params": dict(self.best.params),
        }
        return {"begun": self.begun, "trials": self.count, "best": best}


def sweep_progress(folder: RunFolder, sweep: SweepConfig) -> SweepProgress:
    """Reads how far a sweep has come."""
    trials = rank_trials(folder, sweep)
    best = trials[0] if trials and trials[0].rank == 1 else None
    return SweepProgress(len(trials), max(sweep.count, len(trials)), sweep.metric, best)
