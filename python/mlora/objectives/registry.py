"""Objectives by the names that stand in a config. Imports no torch: a config is read without it.

To add an objective, write a class as `mlora.objectives.objective.Objective` says, and register it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlora.objectives.objective import Objective

CROSS_ENTROPY = "cross_entropy"
_OBJECTIVES: dict[str, str | type[Objective]] = {
    CROSS_ENTROPY: "mlora.objectives.cross_entropy:CrossEntropy",
}


def register_objective(name: str, kind: type[Objective]) -> None:
    """Gives an objective a name, which `objective` may then be.

    Args:
        name: not taken.
        kind: the class; it is made without arguments.

    Raises:
        ValueError: the name is taken by another objective.
    """
    if _OBJECTIVES.get(name, kind) is not kind:
        raise ValueError(f"objective: there is an objective {name!r} already; choose another name")
    _OBJECTIVES[name] = kind


def objective_names() -> list[str]:
    """Returns the names of all objectives."""
    return list(_OBJECTIVES)


def objective_of(name: str) -> Objective:
    """Makes the objective of a name.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in _OBJECTIVES:
        raise ValueError(f"objective: expected one of {', '.join(_OBJECTIVES)}, got {name!r}")
    found = _OBJECTIVES[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _OBJECTIVES[name] = getattr(import_module(module), attribute)
    return found()
