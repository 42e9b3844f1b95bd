"""SegmentLayout: defaults, table, refusals."""

import pytest
import torch

from mlora_ext import SegmentLayout


def test_defaults() -> None:
    layout = SegmentLayout.from_lengths([5, 0, 3])
    assert layout.adapters == (0, 1, 2)
    assert layout.row0 == (0, 0, 0)
    assert (layout.total_rows, layout.num_adapters) == (8, 3)


def test_row0_counts_each_adapters_rows() -> None:
    layout = SegmentLayout.from_lengths([5, 2, 3, 4, 1], adapters=[1, -1, 1, 0, 1])
    assert layout.row0 == (0, 0, 5, 0, 8)


def test_table() -> None:
    layout = SegmentLayout.from_lengths([5, 0, 3], adapters=[1, 0, -1], row0=[7, 8, 0])
    table = layout.table()
    assert table.dtype == torch.int64
    assert table[:3].tolist() == [[0, 5, 1, 7], [5, 5, 0, 8], [5, 8, -1, 0]]
    assert (table[3:] == torch.tensor([0, 0, -1, 0])).all()
    assert layout.table() is table


@pytest.mark.parametrize(("segments", "rows"), [(0, 64), (1, 64), (64, 64), (65, 128), (300, 512)])
def test_table_sizes_repeat(segments: int, rows: int) -> None:
    assert SegmentLayout.from_lengths([1] * segments).table().shape == (rows, 4)


def test_remap_keeps_rows() -> None:
    layout = SegmentLayout.from_lengths([5, 2, 3], adapters=[1, -1, 0], row0=[4, 0, 9]).remap([-1, 0])
    assert layout.adapters == (0, -1, -1)
    assert layout.row0 == (4, 0, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [1, -2]}, r"lengths\[1\]: expected an integer >= 0, got -2"),
        ({"lengths": [1.5]}, r"lengths: expected integers, got \[1\.5\]"),
        ({"lengths": [1, 2], "adapters": [0]}, r"adapters: expected one value per segment \(2\), got 1"),
        ({"lengths": [1], "adapters": [-2]}, r"adapters\[0\]: expected an integer >= -1, got -2"),
        ({"lengths": [1], "row0": [0, 1]}, r"row0: expected one value per segment \(1\), got 2"),
    ],
)
def test_refusals(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentLayout.from_lengths(**arguments)
