"""Makes each adapter's own callbacks of the classes, functions and instances that a user gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mlora.config.run_config import RunConfig
from mlora.errors import RunError, first_line
from mlora.objectives.function_file import function_of
from mlora.objectives.options import ObjectiveError

if TYPE_CHECKING:
    from transformers import TrainerCallback


def check_callbacks(config: RunConfig) -> None:
    """Imports the callbacks that a config names; RunError if one cannot be imported."""
    found = [(adapter.name, adapter.callbacks) for adapter in config.adapters]
    if config.sweep:
        shared = config.defaults.callbacks
        found += [("sweep", sample.get("callbacks", shared)) for sample in config.sweep.samples()]
    for name, specs in found:
        for index, spec in enumerate(specs or ()):
            _imported(spec, f"{name}: callbacks[{index}]")


def check_given(given: Sequence[Any]) -> None:
    """Raises TypeError if the argument ``callbacks`` holds something else than `given_callbacks` takes."""
    if given and not isinstance(given, list | tuple):
        raise TypeError(f"callbacks: expected a list, got {type(given).__name__}")
    for index, one in enumerate(given):
        if not callable(one) and not _is_callback(one):
            raise TypeError(
                f"callbacks[{index}]: expected a TrainerCallback, its class, or a function of an adapter's "
                f"name, got {type(one).__name__}"
            )


def named_callbacks(specs: Sequence[Any]) -> list[TrainerCallback]:
    """Returns new callbacks of what ``callbacks`` of a config names; RunError if one cannot be made."""
    found: list[TrainerCallback] = []
    for index, spec in enumerate(specs):
        where = f"callbacks[{index}]"
        options = {key: value for key, value in spec.items() if key != "name"} if _maps(spec) else {}
        found += _made(partial(_imported(spec, where), **options), where)
    return found


def given_callbacks(adapter: str, given: Sequence[Any]) -> list[TrainerCallback]:
    """Returns an adapter's own callbacks of the argument ``callbacks``; RunError if one cannot be made.

    A class is called without arguments, a function with the adapter's name (it returns a callback, several or
    None), and an instance is copied.
    """
    found: list[TrainerCallback] = []
    for index, one in enumerate(given):
        where = f"callbacks[{index}]"
        if isinstance(one, type):
            found += _made(one, where)
        elif _is_callback(one):
            hint = "; give its class, or a function of an adapter's name, since each adapter has its own"
            found += _made(partial(copy.deepcopy, one), f"{where}: cannot be copied", hint)
        else:
            found += _made(partial(one, adapter), where)
    return found


def _imported(spec: Any, where: str) -> Callable[..., Any]:
    try:
        found = function_of(spec["name"] if _maps(spec) else spec)
    except ObjectiveError as error:
        raise RunError(f"{where}: {error.message}") from error
    if not callable(found):
        raise RunError(f"{where}: expected a class, got {type(found).__name__}")
    return found


def _maps(spec: Any) -> bool:
    return isinstance(spec, Mapping)


def _is_callback(one: Any) -> bool:
    from transformers import TrainerCallback  # imports torch

    return isinstance(one, TrainerCallback)


class Refusals:
    """Raises whatever code of users or a library raises as a RunError: it may raise anything.

    `typed` names the class of the error, too.
    """

    def __init__(self, where: str, hint: str = "", *, typed: bool = True) -> None:
        self._where, self._hint, self._typed = where, hint, typed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            name = f"{type(error).__name__}: " if self._typed else ""
            raise RunError(f"{self._where}: {name}{first_line(error)}{self._hint}") from error


def _made(make: Callable[[], Any], where: str, hint: str = "") -> list[TrainerCallback]:
    with Refusals(where, hint):
        made = make()
    found = [] if made is None else list(made) if isinstance(made, list | tuple) else [made]
    for one in found:
        if not _is_callback(one):
            raise RunError(f"{where}: expected a TrainerCallback of Transformers, got {type(one).__name__}")
    return found
