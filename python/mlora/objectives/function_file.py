"""Finds a loss of one's own by its name: ``module:function``, or ``file.py:function``."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from mlora.errors import first_line
from mlora.objectives.options import ObjectiveError


def placed(name: str, folder: Path | str) -> str:
    """Returns a name with the absolute path of its file, if `folder` has it; else the name as it is.

    ``my_losses:margin`` means the file ``my_losses.py``. A file in the folder comes before modules on
    Python's path.
    """
    module, _, function = name.rpartition(":")
    path = Path(folder) / (module if module.endswith(".py") else f"{module}.py")
    return f"{path.resolve()}:{function}" if path.is_file() else name


def function_of(name: str, folder: Path | str | None = None) -> Any:
    """Returns what a name means. ObjectiveError if it cannot be imported; it names the folder of `placed`."""
    module, _, function = name.rpartition(":")
    with _FailuresOfImport(name, folder):
        if not module.endswith(".py"):
            return resolve_name(name)
        found: Any = _module_of(module)
        for part in function.split("."):
            if not hasattr(found, part):
                raise AttributeError(f"it has no {function!r}")
            found = getattr(found, part)
        return found


@cache
def _module_of(path: str) -> ModuleType:
    """Reads a file, once in a process, as an import does; it may import files beside it."""
    name = f"mlora_{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    folder = str(Path(path).parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


class _FailuresOfImport:
    """Raises whatever an import raises as an ObjectiveError in one line: a module may raise anything."""

    def __init__(self, name: str, folder: Path | str | None) -> None:
        self._name, self._folder = name, folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        reason = first_line(error)
        if not isinstance(error, ImportError | AttributeError | OSError):
            reason = f"{type(error).__name__}: {reason}"
        lacks = isinstance(error, ModuleNotFoundError) and error.name == self._name.rpartition(":")[0]
        if lacks and self._folder is not None:
            reason += f", and there is no {Path(self._folder).resolve() / self._name.rpartition(':')[0]}.py"
        raise ObjectiveError(f"{self._name}: cannot be imported: {reason}", ("name",)) from error
