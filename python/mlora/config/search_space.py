"""The search space of a sweep: ``search`` is nested like the fields of an adapter.

A leaf is ``{choice: [...]}``, or ``{low: , high: }`` with ``log`` or ``step``. Whole bounds give whole
numbers. A parameter of a trial is named by its path, such as ``lora.r``.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from mlora.config.aliases import known_as
from mlora.config.strict import shown, wrong_key

Number = int | float
Param = int | float | str
"""A value as Optuna stores it: a number, or the text of a choice."""

LEAF_KEYS = {"choice", "low", "high", "log", "step"}


@dataclass(frozen=True)
class Choice:
    """One of several values of any kind."""

    keys: tuple[str, ...]  # the path to the field, from an adapter
    values: Mapping[str, Any]  # each value by its text

    def value(self, param: Param) -> Any:
        """Returns the value that a parameter stands for."""
        return self.values[str(param)]

    @property
    def count(self) -> int:
        """The number of values."""
        return len(self.values)

    def member(self, index: int) -> Param:
        """Returns the parameter at an index of the grid."""
        return list(self.values)[index]


@dataclass(frozen=True)
class Range:
    """A number between two bounds, both included."""

    keys: tuple[str, ...]  # the path to the field, from an adapter
    low: Number  # a whole number if whole numbers are drawn
    high: Number  # likewise; with a step, the last number that can be drawn
    log: bool = False  # whether numbers are drawn evenly over the logarithm
    step: Number | None = None  # counted from `low`; None = any number

    @property
    def whole(self) -> bool:
        """Whether whole numbers are drawn."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def value(self, param: Param) -> Number:
        """Returns the value that a parameter stands for."""
        return int(param) if self.whole else float(param)

    @property
    def count(self) -> int | None:
        """How many numbers there are; None if they cannot be counted."""
        step = self._step
        return None if step is None else round((self.high - self.low) / step) + 1

    def member(self, index: int) -> Param:
        """Returns the number at an index of the grid."""
        assert self._step is not None
        return min(self.low + index * self._step, self.high)

    @property
    def _step(self) -> Number | None:
        return self.step or (1 if self.whole and not self.log else None)


Leaf = Choice | Range
Space = dict[str, Leaf]
"""The leaves of a search space by path, in the order of the config."""


def read_space(search: Mapping[str, Any]) -> Space:
    """Returns the leaves of ``search``. ValidationError if it is empty or holds anything else."""
    space = dict(_leaves((), search))
    if not space:
        raise wrong_key("", "must not be empty")
    return space


def _leaves(keys: tuple[str, ...], node: Any) -> Iterator[tuple[str, Leaf]]:
    path = ".".join(keys)
    if not isinstance(node, Mapping) or (keys and not node):
        called = known_as(keys[-1], sorted(LEAF_KEYS)) if keys else None
        if called:
            raise wrong_key(path, f"unknown key; did you mean {called!r}?")
        raise wrong_key(
            path,
            "must be {choice: [...]} or {low: ..., high: ...}, "
            f"got {shown(node)}; write a fixed value under sweep.adapter",
        )
    if LEAF_KEYS.isdisjoint(node) or not keys:
        for key, inner in node.items():
            yield from _leaves((*keys, str(key)), inner)
        return
    unknown = [str(key) for key in node if key not in LEAF_KEYS]
    if unknown:
        raise wrong_key(f"{path}.{unknown[0]}", "unknown key; known keys: choice, or low, high, log, step")
    yield path, _choice(keys, node) if "choice" in node else _range(keys, node)


def _choice(keys: tuple[str, ...], node: Mapping[str, Any]) -> Choice:
    path = ".".join(keys)
    if len(node) > 1:
        raise wrong_key(path, "choice cannot be combined with low, high, log or step")
    values = node["choice"]
    if not isinstance(values, list) or not values:
        raise wrong_key(f"{path}.choice", f"must be a list of values, got {values!r}")
    texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise wrong_key(f"{path}.choice", f"{twice} is listed twice")
    return Choice(keys, dict(zip(texts, values, strict=True)))


def _range(keys: tuple[str, ...], node: Mapping[str, Any]) -> Range:
    path = ".".join(keys)
    for key in ("low", "high"):
        if key not in node:
            raise wrong_key(f"{path}.{key}", "is missing")
    for key in ("low", "high", "step"):
        value = node.get(key)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise wrong_key(f"{path}.{key}", f"must be a number, got {value!r}")
    low, high, step, log = node["low"], node["high"], node.get("step"), node.get("log", False)
    if type(log) is not bool:
        raise wrong_key(f"{path}.log", f"must be true or false, got {log!r}")
    if low > high:
        raise wrong_key(f"{path}.high", f"must be at least low, {low}, got {high}")
    if log and low <= 0:
        raise wrong_key(f"{path}.low", f"must be above 0 with log, got {low}")
    if log and step is not None:
        raise wrong_key(f"{path}.step", "cannot be combined with log")
    if step is not None and step <= 0:
        raise wrong_key(f"{path}.step", f"must be above 0, got {step}")
    if Range(keys, low, high).whole and type(step) is float:
        raise wrong_key(f"{path}.step", f"must be a whole number, like low and high, got {step}")
    if step is not None:
        first, each = Decimal(str(low)), Decimal(str(step))
        last = first + (Decimal(str(high)) - first) // each * each
        high = int(last) if Range(keys, low, high).whole else float(last)
    return Range(keys, low, high, log, step)


def grid_size(space: Space) -> int | None:
    """Returns how many combinations a space has, or None if they cannot be counted."""
    counts = [leaf.count for leaf in space.values()]
    return None if None in counts else math.prod(count for count in counts if count is not None)


def grid_point(space: Space, number: int) -> dict[str, Param]:
    """Returns combination `number` of a space that can be counted; the last parameter changes fastest."""
    point: dict[str, Param] = {}
    for path, leaf in reversed(space.items()):
        assert leaf.count is not None
        number, index = divmod(number, leaf.count)
        point[path] = leaf.member(index)
    return {path: point[path] for path in space}


def with_params(fields: Mapping[str, Any], space: Space, params: Mapping[str, Param]) -> dict[str, Any]:
    """Returns a copy of an adapter's fields with the values of a trial's parameters."""
    filled = copy.deepcopy(dict(fields))
    for path, param in params.items():
        *parents, last = space[path].keys
        node = filled
        for key in parents:
            if not isinstance(node.get(key), dict):  # an objective may be its name alone
                node[key] = {"name": node[key]} if isinstance(node.get(key), str) else {}
            node = node[key]
        node[last] = space[path].value(param)
    return filled


def corners(space: Space) -> Iterator[dict[str, Param]]:
    """Yields combinations that together hold both bounds of each range and every choice."""
    ends = {
        path: list(leaf.values) if isinstance(leaf, Choice) else [leaf.low, leaf.high]
        for path, leaf in space.items()
    }
    for turn in range(max(map(len, ends.values()))):
        yield {path: values[min(turn, len(values) - 1)] for path, values in ends.items()}
