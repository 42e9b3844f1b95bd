"""What a stage predicts of its micro-batches, for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forecast:
    """What a stage predicts of one micro-batch; plain values.

    Attributes:
        tokens: of the micro-batch.
        seconds: of its forward and backward pass, and of the update if it is on disk.
        bound: what bounds the longest part: `compute`, `disk`, `read`, `processor` and so on.
        hides: tokens at which streaming the base takes no time of its own (T*); 0 = nothing is streamed.
        activations: how many blocks keep, recompute or swap their activations.
        case: why; empty if the config says so.
    """

    tokens: int
    seconds: float
    bound: str
    hides: int
    activations: dict[str, int]
    case: str

    def lines(self) -> list[str]:
        """Returns lines for people."""
        modes = ", ".join(f"{mode} {count}" for mode, count in self.activations.items())
        why = f" ({self.case})" if self.case else ""
        found = [
            f"a micro-batch of {self.tokens} tokens: {self.seconds:.3g} s predicted, bound by {self.bound}",
            f"activations of blocks: {modes}{why}",
        ]
        if self.hides:
            more = max(1.0, self.hides / self.tokens)
            enough = "enough" if self.tokens >= self.hides else f"{more:.1f} times as many as there are"
            found.append(f"streaming the base is hidden from {self.hides} tokens on: {enough}")
        return found
