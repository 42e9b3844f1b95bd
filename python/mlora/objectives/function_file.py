"""Finds a loss of one's own by its name: ``module:function``, or ``file.py:function``."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import invalidate_caches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from mlora.errors import first_line, spelt_alike
from mlora.objectives.imported_files import imported_files
from mlora.objectives.options import ObjectiveError

_SHARED = {*sys.stdlib_module_names, "__main__", "mlora", "mlora_ext"}
"""Modules that files of the same names do not hide."""


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
                raise AttributeError(f"it has no {function!r}{_near(part, found)}")
            found = getattr(found, part)
        return found


def _near(word: str, found: Any) -> str:
    """Returns the end of a message: which function of a module or class is spelt most alike, if one is."""
    near = spelt_alike(word, [name for name, value in vars(found).items() if callable(value)])
    return f"; did you mean {near!r}?" if near else ""


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
    for path, digest in sources_of(name).items():
        try:
            if _digest_of(path) != digest:
                return path
        except OSError:
            return path
    return None


def _digest_of(path: str) -> str:
    return _digest(Path(path).read_bytes())


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


@dataclass(frozen=True)
class _LossFile:
    """A file that was read; `sources` as `sources_of`."""

    module: ModuleType
    sources: Mapping[str, str]


@dataclass(frozen=True)
class _Helpers:
    """What loss files have imported from their folder: modules by name, and the code of files."""

    modules: dict[str, ModuleType] = field(default_factory=dict)
    sources: dict[Path, bytes] = field(default_factory=dict)


@cache
def _helpers_of(folder: Path) -> _Helpers:
    """Returns the modules that all loss files of a folder share, as a process imports a module once."""
    return _Helpers()


@cache
def _read(path: str) -> _LossFile:
    """Reads a file, once in a process, as an import does; it may import files beside it."""
    name = f"mlora_{Path(path).stem}_{_digest(path.encode())[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    source = Path(path).read_bytes()  # what is hashed is what runs
    sys.modules[name] = module = module_from_spec(spec)
    folder = Path(path).absolute().parent
    with _imports_from(folder) as tops:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
        tops = {top for top in tops if not _hides(top, sys.modules.get(top))}
        read = _helpers_of(folder).sources
        files = sorted(imported_files(source, folder, tops, read))
    return _LossFile(module, {path: _digest(source), **{str(file): _digest(read[file]) for file in files}})


@contextmanager
def _imports_from(folder: Path) -> Iterator[set[str]]:
    """Lets imports find the files of a folder first; its value is the names that they have at the top.

    Other code does not see the modules that are imported from it: another folder may have files of the same
    names. Modules that the process has imported from this folder itself, and installed packages, are used as
    they are. If an import fails, the next one begins anew.
    """
    own = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}
    kept = _helpers_of(folder).modules
    known = {name.partition(".")[0] for name in kept}
    aside = {
        name: module
        for name, module in list(sys.modules.items())
        if (top := name.partition(".")[0]) in known
        or (top in own and not _hides(top, module) and not _is_in(module, folder / top))
    }
    for name in aside:
        del sys.modules[name]
    before = {name.partition(".")[0] for name in sys.modules}
    sys.modules.update(kept)
    sys.path.insert(0, str(folder))
    invalidate_caches()
    found: dict[str, ModuleType] = {}
    try:
        yield own
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            top = name.partition(".")[0]
            if top not in before and not _installed(module) and _is_in(module, folder / top):
                found[name] = sys.modules.pop(name)
        sys.modules.update(aside)
    kept.update(found)


def _hides(top: str, module: ModuleType | None) -> bool:
    """Whether the module that imports of this name give comes before a loss file's folder."""
    return top in _SHARED or _installed(module)


def _is_in(module: ModuleType, place: Path) -> bool:
    """Whether a module's file is that of the name `place`, or in the package of this name."""
    file, place = _file_of(module), place.resolve()
    if not file.parts:
        return False
    file = file.resolve()
    return file == place.with_name(f"{place.name}.py") or file.is_relative_to(place)


def _file_of(module: ModuleType | None) -> Path:
    """Returns a module's file, or the folder of a package that has no file."""
    return Path(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), ""))


def _installed(module: ModuleType | None) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(_file_of(module).parts)


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
        module, _, function = self._name.rpartition(":")
        lacks = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if lacks and self._folder is not None:
            file = f"{module.replace('.', '/')}.py"
            path = Path(self._folder).resolve() / file
            reason += (
                f"; for {path} write {file}:{function}" if path.is_file() else f", and there is no {path}"
            )
        raise ObjectiveError(f"{self._name}: cannot be imported: {reason}", ("name",)) from error
