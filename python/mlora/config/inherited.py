"""Which fields of ``defaults`` an adapter takes over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def inherited(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of ``defaults`` for an adapter with fields of its `own`, which then go over them.

    ``max_steps`` wins over ``num_train_epochs`` if both stand in one place. An adapter's own epochs win over
    steps from ``defaults``.
    """
    found = dict(defaults)
    if "num_train_epochs" in own and "max_steps" not in own:
        found.pop("max_steps", None)
    return found
