"""The labels in a file of the format `classification`, as one pass over its lines finds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mlora.data.readers import Row


@dataclass(frozen=True)
class FoundLabels:
    """What the labels of a file look like.

    Attributes:
        first: the first label, of lists the first that holds more than -100; None: no line has one.
        names: the labels that are text, sorted, if `first` is text or holds text; else empty.
        lengths: of lists of numbers, the numbers of values, up to the list that decides `flags`.
        flags: whether these lists hold 0 and 1 as flags: one of them repeats a value, which ids do not, or
            none of them shows that they are ids.
    """

    first: Any = None
    names: tuple[str, ...] = ()
    lengths: frozenset[int] = frozenset()
    flags: bool = True

    @property
    def is_text(self) -> bool:
        """Whether the first label is text, or a list with text."""
        return _is_text(self.first)

    def are_flags(self, count: int | None) -> bool:
        """Whether lists hold 0 or 1 for each of `count` labels, not ids."""
        return self.flags and self.lengths <= {count}


def find_labels(rows: Iterable[Row], task: str) -> FoundLabels:
    """Reads the labels of a dataset's rows, up to the one that tells all; those that are text to the end.

    Args:
        task: the adapter's `task_type`.

    Raises:
        RunError: the file cannot be read.
    """
    labels = _labels(rows, task)
    before: list[Any] = []  # lists without any label
    first = None
    for given in labels:
        if given is not None and (not isinstance(given, list) or any(one != -100 for one in given)):
            first = given
            break
        before += [] if given is None else [given]
    if _is_text(first):
        return FoundLabels(first, _names(chain([first], labels)))
    lists = chain(before, [first], labels) if isinstance(first, list) else before
    return FoundLabels(first, (), *_sizes(lists))


def _labels(rows: Iterable[Row], task: str) -> Iterator[Any]:
    """Yields the labels of a dataset's lines; None where a line has none."""
    for _, fields in rows:
        yield fields.get("labels" if task == "TOKEN_CLS" else "label")


def _is_text(given: Any) -> bool:
    return any(isinstance(one, str) for one in (given if isinstance(given, list) else [given]))


def _names(labels: Iterable[Any]) -> tuple[str, ...]:
    each = (one for given in labels for one in (given if isinstance(given, list) else [given]))
    return tuple(sorted({one for one in each if isinstance(one, str)}))


def _sizes(labels: Iterable[Any]) -> tuple[frozenset[int], bool]:
    """Returns `FoundLabels.lengths` and `flags`."""
    lengths = set()
    for given in labels:
        if isinstance(given, list):
            lengths.add(len(given))
            if any(one not in (0, 1) for one in given):
                return frozenset(lengths), False
            if given.count(0) > 1 or given.count(1) > 1:
                break
    return frozenset(lengths), True
