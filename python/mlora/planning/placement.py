"""Says where the parts of a run are while it trains, in memory or on disk, and how large they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import gettempdir

from mlora.engine.memory_limit import in_units
from mlora.offload.base_bytes import BaseBytes
from mlora.offload.options import STATE_BYTES, OffloadOptions
from mlora.planning.memory_plan import MemoryPlan


@dataclass(frozen=True)
class Placement:
    """Where the parts of a run are.

    Attributes:
        base: of each stage.
        options: what was asked for.
        plan: says what the tasks that train at once need; None = it is not known.
        forecast: lines on the time of a micro-batch, and on what bounds it.
        trained: weights of the model that are trained; 0 = adapters are.
    """

    base: Sequence[BaseBytes]
    options: OffloadOptions
    plan: MemoryPlan | None = None
    forecast: Sequence[str] = ()
    trained: int = 0

    def table(self) -> list[list[str]]:
        """Returns rows of text, titles first."""
        stages = range(len(self.base))
        titles = ["size"] if len(self.base) == 1 else [f"stage {stage}" for stage in stages]
        rows = [["", "where", *titles]]

        def row(what: str, where: str, sizes: Sequence[int]) -> None:
            rows.append([what, where, *map(in_units, sizes)])

        streamed = [base.streamed for base in self.base]
        row("base model, what stays" if any(streamed) else "base model", "memory", self._of_base("resident"))
        if any(streamed):
            row("base model, slots for blocks", "memory", self._of_base("slots"))
            row("base model, weights of blocks", "disk", streamed)
        if self.plan is not None:
            row("optimizer states", "memory", self.plan.optimizer)
            kept = self.options.activations == "keep"
            row("activations" if kept else "activations, if all were kept", "memory", self.plan.activations)
        if self.trained:
            states = [STATE_BYTES * self.trained]
            where = "disk" if self.options.optimizer == "disk" else "memory"
            row("fp32 weights and moments", where, states)
            row("the same in each checkpoint", "disk", states)
        return rows

    def lines(self) -> list[str]:
        """Returns what the table cannot say, one fact a line."""
        streamed, converted = sum(self._of_base("streamed")), sum(self._of_base("converted"))
        found = []
        if streamed > converted:
            found.append(f"{in_units(streamed - converted)} of weights are read from the model's own files")
        if converted and self.trained:
            found.append(
                f"{in_units(converted)} of weights are trained, so they are copied into scratch files in "
                f"{self._folders()}"
            )
        elif converted:
            found.append(
                f"{in_units(converted)} of weights have another dtype or layout in the model's files; the "
                f"run converts them into scratch files in {self._folders()}"
            )
        return [*found, *self.forecast]

    def _folders(self) -> str:
        return ", ".join(self.options.folders) or gettempdir()

    def _of_base(self, part: str) -> list[int]:
        return [int(getattr(base, part)) for base in self.base]
