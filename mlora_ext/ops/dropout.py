"""Counter-based dropout: a mask depends only on the adapter's seed and step, the layer, row and column.

Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). docs/design.md, section
"Dropout", lays out the counters; every backend draws the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from ..backends.interface import PHILOX_ROUNDS
from ..upload import once_per_stream, to_device

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
LEVELS = 65536
"""Of a probability: p is used as `round(p * LEVELS) / LEVELS`."""
_COLUMNS_PER_COUNTER = 8


def dropout_threshold(p: float) -> int:
    """Returns `round(p * 65536)`: of the 65536 equally likely numbers, those below it mean "dropped"."""
    return round(p * LEVELS)


def philox(
    counter: Sequence[torch.Tensor | int], key: tuple[torch.Tensor | int, torch.Tensor | int]
) -> list[torch.Tensor]:
    """Returns the four int64 tensors of 32-bit words that Philox4x32-7 makes of a vector of counters.

    Args:
        counter: four int64 tensors (or integers) that broadcast together, each taken modulo 2^32.
        key: two 32-bit words, or int64 tensors of them that broadcast with the counters.
    """
    device = next((c.device for c in counter if isinstance(c, torch.Tensor)), None)
    c0, c1, c2, c3 = torch.broadcast_tensors(
        *(torch.as_tensor(c, dtype=torch.int64, device=device) & _MASK for c in counter)
    )
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap modulo 2^64; the mask makes the arithmetic shift a logical one.
        low, high = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return [c0, c1, c2, c3]


def philox_mask(
    rows: int,
    columns: int,
    *,
    p: float,
    seed: int,
    step: int,
    layer: int,
    row0: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Returns which elements of one segment are kept: `[rows, columns]` bool.

    Args:
        columns: d_in.
        p: probability of dropping; used as `round(p * 65536) / 65536`.
        seed: the adapter's 64-bit seed.
        step: the adapter's optimizer step.
        layer: index of the layer in the whole model.
        row0: index of the segment's first row within the adapter's step.
    """
    row = torch.arange(row0, row0 + rows, device=device).unsqueeze(1)
    return philox_rows(row, columns, seed, step, layer) >= dropout_threshold(p)


def philox_rows(
    row: torch.Tensor,
    columns: int,
    seed: torch.Tensor | int,
    step: torch.Tensor | int,
    layer: torch.Tensor | int,
) -> torch.Tensor:
    """Returns the numbers below `LEVELS` that decide what is dropped: `[rows, columns]` int64.

    Args:
        row: `[rows, 1]` int64, index of each row within its adapter's step.
        columns: d_in.
        seed: 64-bit seed of all rows, or `[rows, 1]` int64.
        step: optimizer step of all rows, or `[rows, 1]` int64.
        layer: index of the layer in the whole model, or `[]` int64.
    """
    counters = (columns + _COLUMNS_PER_COUNTER - 1) // _COLUMNS_PER_COUNTER
    column = torch.arange(counters, device=row.device).unsqueeze(0)
    words = philox((column, row, layer, step), (seed & _MASK, (seed >> 32) & _MASK))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).reshape(len(row), counters * _COLUMNS_PER_COUNTER)[:, :columns]


@dataclass(frozen=True)
class LoRADropout:
    """Dropout on the input of the low-rank part, with one probability and seed per adapter.

    Attributes:
        p: probability per adapter, `0 <= p < 1`.
        seeds: 64-bit seed per adapter.
        step: optimizer step, one for all adapters or one per adapter.
        layer: index of the layer in the whole model; different layers draw independent masks.

    Raises:
        ValueError: the lists differ in length, or a probability is out of range.

    Example:
        >>> dropout = LoRADropout(p=[0.1, 0.0], seeds=[7, 8], step=3)
        >>> y = multi_lora_linear(x, weight, None, lora_a, lora_b, [2.0, 1.0], layout, dropout=dropout)
    """

    p: Sequence[float]
    seeds: Sequence[int]
    step: int | Sequence[int] = 0
    layer: int = 0
    _tensors: dict[Hashable, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        for name in ("seeds", "step"):
            values = getattr(self, name)
            if not isinstance(values, int) and len(values) != len(self.p):
                raise ValueError(
                    f"dropout.{name}: expected one per adapter ({len(self.p)}), got {len(values)}"
                )
        for index, p in enumerate(self.p):
            check_probability(f"dropout.p[{index}]", p)

    @torch.inference_mode(False)
    def tensors(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the operator's `dropout_p [N]` fp32, `dropout_rng [N, 2]` int64 and `layer []` int64.

        Args:
            device: the tensors' device; they are copied to it once.

        Raises:
            RuntimeError: a CUDA graph is being captured, and a probability is not 0.
        """
        device = torch.device(device)
        if any(self.p):
            refuse_capture(device)

        def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            steps = [self.step] * len(self.p) if isinstance(self.step, int) else self.step
            return (
                to_device(torch.tensor(self.p, dtype=torch.float32, device="cpu"), device),
                to_device(rng_table(self.seeds, steps), device),
                to_device(torch.tensor(self.layer, dtype=torch.int64, device="cpu"), device),
            )

        return once_per_stream(self._tensors, "tensors", device, made)


def rng_table(seeds: Sequence[int], steps: Sequence[int]) -> torch.Tensor:
    """Returns the operator's `dropout_rng`: `[N, 2]` int64 `(seed, step)`; a 64-bit seed keeps its bits."""
    rows = [(_signed(seed), step) for seed, step in zip(seeds, steps, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 2)


def refuse_capture(device: torch.device) -> None:
    """Raises RuntimeError while a CUDA graph is captured: it would draw the same masks at every replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dropout: a CUDA graph would draw the same masks at every replay; capture with p = 0, or run "
            "this step without a graph"
        )


def check_probability(name: str, p: float) -> None:
    """Refuses p outside of `[0, 1)`, or so near to 1 that all is dropped. Raises ValueError with `name`."""
    if not isinstance(p, int | float) or not 0.0 <= p < 1.0 or dropout_threshold(p) >= LEVELS:
        raise ValueError(f"{name}: expected a probability with 0 <= p < 1, got {p!r}")


def _signed(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
