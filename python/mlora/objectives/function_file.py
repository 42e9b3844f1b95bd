"""Finds a loss of one's own by its name: ``module:function``, or ``file.py:function``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from mlora.errors import spelt_alike
from mlora.objectives.loss_folder import LossFolder, digest_of, said_by
from mlora.objectives.options import ObjectiveError


def placed(name: str, folder: Path | str) -> str:
    """Returns a name with the absolute path of its file, if `folder` has it; else the name as it is.

    ``my_losses:margin`` means the file ``my_losses.py``. A file in the folder comes before modules on
    Python's path.
    """
    module, _, function = name.rpartition(":")
    path = Path(folder) / (module if module.endswith(".py") else f"{module}.py")
    return f"{path.resolve()}:{function}" if path.is_file() else name


def function_of(name: str) -> Any:
    """Runs a file or a module and returns what a name means. ObjectiveError if it cannot be imported."""
    module, _, function = name.rpartition(":")
    with _FailuresOfImport(name):
        if not module.endswith(".py"):
            return resolve_name(name)
        found: Any = _folder_of(module).module(_path_of(module))
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
    with _FailuresOfImport(name):
        return _folder_of(module).digests(_path_of(module))


def changed_source(name: str) -> str | None:
    """Returns the path of the first file of `sources_of` that holds other code now, or is gone; or None."""
    for path, digest in sources_of(name).items():
        try:
            if digest_of(Path(path).read_bytes()) != digest:
                return path
        except OSError:
            return path
    return None


def renew(names: Collection[str]) -> list[str]:
    """Executes the files of functions anew, from the code that was read, as if nothing had been called.

    A module named as ``module:function`` stays as it is. So do files that cannot be executed twice, and those
    beside them: the result says why.
    """
    files = {module: name for name in names if (module := name.rpartition(":")[0]).endswith(".py")}
    faults = []
    for folder, name in {_folder_of(module): name for module, name in files.items()}.items():
        try:
            with _FailuresOfImport(name):
                folder.renew()
        except ObjectiveError as error:
            faults.append(str(error))
    return faults


def _path_of(module: str) -> Path:
    return Path(module).absolute()


def _folder_of(module: str) -> LossFolder:
    return _folder(_path_of(module).parent)


@cache
def _folder(path: Path) -> LossFolder:
    """Returns the modules that all loss files of a folder share, as a process imports a module once."""
    return LossFolder(path)


class _FailuresOfImport:
    """Raises whatever an import raises as an ObjectiveError in one line: a module may raise anything."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        from mlora.objectives.own_code import TorchSettings

        self._settings = TorchSettings()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from mlora.objectives.own_code import is_own_failure

        changed = self._settings.put_back()
        if error is None and changed:
            raise ObjectiveError(f"{self._name}: cannot be imported: {changed}", ("name",))
        if error is None or not is_own_failure(error):
            return
        reason = said_by(error)
        if not isinstance(error, ImportError | AttributeError | OSError):
            reason = f"{type(error).__name__}: {reason}"
        module, _, function = self._name.rpartition(":")
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            file = f"{module.replace('.', '/')}.py"
            reason += f"; for a file beside the run's YAML write {file}:{function}"
        raise ObjectiveError(f"{self._name}: cannot be imported: {reason}", ("name",)) from error
