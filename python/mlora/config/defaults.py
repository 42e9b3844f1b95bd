"""How ``defaults`` fill in what an adapter leaves out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def with_defaults(
    defaults: Mapping[str, Any], own: Mapping[str, Any], searched: Collection[str] = ()
) -> dict[str, Any]:
    """Returns an adapter's fields with those of ``defaults`` that it leaves out.

    An adapter's own ``num_train_epochs`` comes before a ``max_steps`` of ``defaults``, which is -1 then.
    `searched` are fields that a sweep will set.
    """
    given = {*own, *searched}
    none = {"max_steps": -1} if "num_train_epochs" in given and "max_steps" not in given else {}
    return {**defaults, **none, **own}
