"""Finds a loss of one's own by its name: ``module:function``, or ``file.py:function``."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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
        found: Any = _read(module).module
        for part in function.split("."):
            if not hasattr(found, part):
                raise AttributeError(f"it has no {function!r}")
            found = getattr(found, part)
        return found


def sources_of(name: str) -> Mapping[str, str]:
    """Returns the SHA-256 of each file whose code a function has, by path; empty for ``module:function``.

    They are those of the code that this process runs. The files may have changed since.
    """
    module, _, _ = name.rpartition(":")
    if not module.endswith(".py"):
        return {}
    with _FailuresOfImport(name, None):
        return _read(module).sources


def changed_source(name: str) -> str | None:
    """Returns the path of the first file of `sources_of` that holds other code now, or is gone; or None."""
    return next((path for path, digest in sources_of(name).items() if _digest_now(path) != digest), None)


def _digest_now(path: str) -> str | None:
    try:
        return _digest(Path(path).read_bytes())
    except OSError:
        return None


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


@dataclass(frozen=True)
class _LossFile:
    """A file that was read; `sources` as `sources_of`."""

    module: ModuleType
    sources: Mapping[str, str]


@cache
def _read(path: str) -> _LossFile:
    """Reads a file, once in a process, as an import does; it may import files beside it."""
    name = f"mlora_{Path(path).stem}_{_digest(path.encode())[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    source = Path(path).read_bytes()  # what is hashed is what runs
    sys.modules[name] = module = module_from_spec(spec)
    folder = str(Path(path).parent)
    sys.path.insert(0, folder)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    finally:
        sys.path.remove(folder)
    return _LossFile(module, {path: _digest(source)})


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
