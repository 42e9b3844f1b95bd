"""Rows of a tied embedding that adapters train, where embedding and head are on different stages.

The first stage holds the rows, and is the only one that steps, counts and saves them. They go through the
pipeline with each micro-batch, beside the hidden state. The last stage's head reads them, and their gradient
comes back to the first stage as that of the hidden state does. So a step, a checkpoint and a fault know
nothing of it.

Letters: n trained rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from mlora.model.base_model import BaseModel
from mlora_ext.layers.row_head import TrainedRowsLinear


def rows_to_pass(base: BaseModel, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns the rows `[n, D]` that go from stage to stage, by adapter; empty if one stage has all layers.

    All stages return the same names in the same order. The rows are Parameters on the first stage, and on the
    meta device elsewhere.

    Args:
        names: of the adapters of a micro-batch.
    """
    span, head = base.span, base.head
    if span is None or span.stages == 1 or not isinstance(head, TrainedRowsLinear):
        return {}
    tied = [name for name in dict.fromkeys(names) if name in head.specs and head.specs[name].tied_to]
    return {name: head.held_rows(name) for name in tied}


def pass_rows(base: BaseModel, rows: Mapping[str, Tensor], received: Sequence[Tensor]) -> list[Tensor]:
    """Returns what this stage sends on of `rows_to_pass`; the last stage gives them to its head.

    Args:
        rows: by `rows_to_pass`.
        received: those of the stage before; empty on the first.
    """
    if base.span is None or not rows:
        return []
    if base.span.is_first:
        return [row.clone() for row in rows.values()]
    if base.is_last:
        give_head(base, dict(zip(rows, received, strict=True)))
        return []
    return list(received)


def give_head(base: BaseModel, rows: Mapping[str, Tensor]) -> None:
    """Gives the head the rows of a micro-batch, in place of those before."""
    head = base.head
    if isinstance(head, TrainedRowsLinear):
        head.received = rows
