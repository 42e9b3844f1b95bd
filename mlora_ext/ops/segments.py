"""Maps the rows of a packed batch to adapters."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..backends.plan import describe
from ..upload import once_per_stream, to_device

SMALLEST_TABLE = 64


@dataclass(frozen=True)
class SegmentLayout:
    """The segments of a batch, in the order of the rows of `x`: each is contiguous rows of one adapter.

    Build it with `from_lengths`. A layout is immutable and lives on the host, so it costs no synchronisation.
    `table` copies it to a device once.

    Attributes:
        lengths: rows of each segment; 0 is allowed.
        adapters: adapter of each segment, an index into the operator's lists; -1 = base only.
        row0: index of each segment's first row within its adapter's optimizer step. Dropout masks depend on
            it: count rows across micro-batches and segments, so that they draw different masks.
    """

    lengths: tuple[int, ...]
    adapters: tuple[int, ...]
    row0: tuple[int, ...]
    _tables: dict[Hashable, torch.Tensor] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("adapters", "row0"):
            values = getattr(self, name)
            if len(values) != len(self.lengths):
                raise ValueError(
                    f"{name}: expected one value per segment ({len(self.lengths)}), got {len(values)}"
                )
        _check_range("lengths", self.lengths, 0)
        _check_range("adapters", self.adapters, -1)
        _check_range("row0", self.row0, 0)

    @classmethod
    def from_lengths(
        cls,
        lengths: Iterable[int],
        adapters: Iterable[int] | None = None,
        row0: Iterable[int] | None = None,
    ) -> SegmentLayout:
        """Builds a layout from the number of rows of each segment.

        Args:
            lengths: rows of each segment, in the order of the rows of `x`.
            adapters: adapter of each segment, -1 = base only. Default 0, 1, 2, ...
            row0: index of each segment's first row within its adapter's optimizer step. Default: the number
                of rows that the same adapter has in earlier segments of this layout.

        Returns:
            The layout.

        Raises:
            ValueError: the lists differ in length, or a value is not an integer or is out of range.

        Example:
            >>> layout = SegmentLayout.from_lengths([512, 256, 0, 1024], adapters=[2, 0, 1, -1])
            >>> layout.total_rows, layout.num_adapters
            (1792, 3)
        """
        lengths_ = _integers("lengths", lengths)
        adapters_ = tuple(range(len(lengths_))) if adapters is None else _integers("adapters", adapters)
        row0_ = _running_rows(lengths_, adapters_) if row0 is None else _integers("row0", row0)
        return cls(lengths_, adapters_, row0_)

    @cached_property
    def total_rows(self) -> int:
        """Number of rows of `x`."""
        return sum(self.lengths)

    @property
    def num_adapters(self) -> int:
        """Smallest number of adapters that the layout can be used with: its largest index + 1."""
        return max(self.adapters, default=-1) + 1

    def remap(self, adapters: Sequence[int]) -> SegmentLayout:
        """Renumbers the adapters: a segment of adapter `i` becomes one of `adapters[i]`. Rows and row0 stay.

        Args:
            adapters: new index of each adapter, -1 = base only; at least `num_adapters` long.

        Returns:
            A new layout.
        """
        return SegmentLayout(
            self.lengths, tuple(-1 if i < 0 else adapters[i] for i in self.adapters), self.row0
        )

    @torch.inference_mode(False)
    def table(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Returns the operator's `segments` argument, made once per device and stream.

        Args:
            device: the table's device.

        Returns:
            `[S, 4]` int64, rows `(begin, end, adapter, row0)`. Unused rows are `(0, 0, -1, 0)`. S is at least
            64 and a power of two, so that layouts of different sizes share one compiled graph.
        """
        device = torch.device(device)

        def made() -> torch.Tensor:
            rows = self._rows()
            table = to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
            describe(table, rows[: len(self.lengths)])
            return table

        return once_per_stream(self._tables, "table", device, made)

    def _rows(self) -> list[tuple[int, int, int, int]]:
        rows, begin = [], 0
        for length, adapter, row0 in zip(self.lengths, self.adapters, self.row0, strict=True):
            rows.append((begin, begin + length, adapter, row0))
            begin += length
        size = SMALLEST_TABLE
        while size < len(rows):
            size *= 2
        return rows + [(0, 0, -1, 0)] * (size - len(rows))


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ValueError(f"{name}: expected integers, got {values!r}") from error


def _running_rows(lengths: Sequence[int], adapters: Sequence[int]) -> tuple[int, ...]:
    seen: dict[int, int] = {}
    row0 = []
    for length, adapter in zip(lengths, adapters, strict=False):
        row0.append(seen.get(adapter, 0) if adapter >= 0 else 0)
        seen[adapter] = row0[-1] + length
    return tuple(row0) + (0,) * (len(lengths) - len(row0))


def _check_range(name: str, values: Sequence[int], smallest: int) -> None:
    for index, value in enumerate(values):
        if value < smallest:
            raise ValueError(f"{name}[{index}]: expected an integer >= {smallest}, got {value}")
