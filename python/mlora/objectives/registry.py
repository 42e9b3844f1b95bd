"""Objectives by their names in a config. Imports no torch, so that a config can be read without it.

To add an objective, subclass `mlora.objectives.objective.Objective` and register the class.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlora.objectives.objective import Objective

CROSS_ENTROPY = "cross_entropy"
_OBJECTIVES: dict[str, str | type[Objective]] = {CROSS_ENTROPY: "mlora.objectives.objective:CrossEntropy"}


def register_objective(name: str, kind: type[Objective]) -> None:
    """Registers an objective under a name for the key `objective`.

    Args:
        name: a name that is not taken.
        kind: the class; it is made without arguments.

    Raises:
        ValueError: another objective has this name.
    """
    if _OBJECTIVES.get(name, kind) is not kind:
        raise ValueError(f"objective: the name {name!r} is taken; choose another one")
    _OBJECTIVES[name] = kind


def objective_names() -> list[str]:
    """Returns the names of all objectives."""
    return list(_OBJECTIVES)


def objective_of(name: str) -> Objective:
    """Makes the objective with this name.

    Raises:
        ValueError: no objective has this name.
    """
    if name not in _OBJECTIVES:
        raise ValueError(f"objective: expected one of {', '.join(_OBJECTIVES)}, got {name!r}")
    found = _OBJECTIVES[name]
    if isinstance(found, str):
        found = _OBJECTIVES[name] = resolve_name(found)
    return found()
