"""Which parameters of slow tests run before each change; the rest is marked `nightly`.

A test over backends runs whole on `cpu` and on `cuda`, which is emulated. On `triton`, whose interpreter is
slow, it runs a pairwise cover: every value of every parameter meets the backend, and every two values meet on
some backend. On a GPU every test runs whole. A test marked `pairwise` runs a cover of its parameters.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

SLOW = "triton"
Setting = tuple[str, str]
"""A parameter's name and its value."""


def settings_of(item: pytest.Item) -> frozenset[Setting]:
    """The parameters of a test, backend included."""
    return frozenset((name, repr(value)) for name, value in item.callspec.params.items())


def pairs_of(settings: Iterable[Setting]) -> set[frozenset[Setting]]:
    """All pairs that a test covers."""
    return {frozenset(pair) for pair in combinations(sorted(settings), 2)}


def cover(fast: Sequence[frozenset[Setting]], slow: Sequence[frozenset[Setting]]) -> list[int]:
    """Indices of those of `slow` that cover every pair which `fast` leaves out, chosen greedily.

    Of two that cover as many new pairs, the one whose pairs have been chosen less often goes first, then the
    first.
    """
    left = set().union(*map(pairs_of, slow)) - set().union(*map(pairs_of, fast))
    if not left:  # a single parameter has no pairs
        return list(range(len(slow)))
    used: Counter[frozenset[Setting]] = Counter()
    chosen: list[int] = []
    while left:
        gains = [(len(pairs_of(one) & left), -sum(used[pair] for pair in pairs_of(one))) for one in slow]
        best = max(range(len(slow)), key=lambda index: (gains[index], -index))
        chosen.append(best)
        left -= pairs_of(slow[best])
        used.update(pairs_of(slow[best]))
    return sorted(chosen)


def leave_the_rest_to_the_night(items: Sequence[pytest.Item]) -> None:
    """Mark `nightly` what no cover needs."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("nightly", "soak", "gpu"))):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        whole = family[0].get_closest_marker("pairwise") is None
        slow = [item for item in family if not whole or item.callspec.params.get("backend") == SLOW]
        fast = [item for item in family if item not in slow]
        chosen = cover([settings_of(item) for item in fast], [settings_of(item) for item in slow])
        for index in set(range(len(slow))) - set(chosen):
            slow[index].add_marker(pytest.mark.nightly)
