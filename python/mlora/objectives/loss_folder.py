"""The Python files of a folder as a package of their own, for the losses in them.

A process may have other modules of the same names: of another folder with losses, or imported by itself.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module, invalidate_caches
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, resolve_name, spec_from_file_location
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType

from mlora.errors import first_line

PACKAGE = "mlora_losses_"
_NUMBERS = count()
_SHARED = {*sys.stdlib_module_names, "__main__", "mlora", "mlora_ext", "torch"}
"""Modules that files of the same names do not hide."""


def digest_of(source: bytes) -> str:
    """Returns the SHA-256 of a file's code."""
    return hashlib.sha256(source).hexdigest()


def said_by(error: BaseException) -> str:
    """Returns the first line of an error, with the names that users gave the modules of a folder."""
    return re.sub(rf"{PACKAGE}\d+\.", "", first_line(error))


class LossFolder(SourceLoader):
    """Finds and loads the modules of a folder, under the name of a package that no other folder has.

    Their import statements are compiled as imports from this package where they name a module of the folder.
    Each file is read once: what runs, also if its import runs later or again, is what digests are of.

    Args:
        folder: an absolute path.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._package = f"{PACKAGE}{next(_NUMBERS)}"
        self._sources: dict[str, bytes] = {}
        self._digests: dict[Path, Mapping[str, str]] = {}
        sys.meta_path.insert(0, self)  # before the finder that would load a file of the package as it is

    def module(self, file: Path) -> ModuleType:
        """Returns the module of a file. If its import fails, the next one begins anew, and reads anew."""
        if file not in self._digests:
            invalidate_caches()
            with self._as_before_if_it_fails():
                self._import(file)
                self._digests[file] = self._digests_from(str(file))
        return self._import(file)

    def digests(self, file: Path) -> Mapping[str, str]:
        """Returns the digests of a file and of those of the folder that it imports, also by one another.

        Import statements say which they are, so it makes no difference what was imported before.
        """
        self.module(file)
        return self._digests[file]

    def renew(self) -> None:
        """Executes all modules anew, from the code that was read; if that fails, those of before stay."""
        with self._as_before_if_it_fails():
            self._put_back({}, self._sources)
            for file in self._digests:
                self._import(file)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Returns how to load a module of the package; None for modules elsewhere, and those that lack."""
        if not f"{name}.".startswith(f"{self._package}."):
            return None
        with suppress(ImportError):
            return spec_from_file_location(name, self.get_filename(name), loader=self)
        parent = self._place(name).parent
        return PathFinder.find_spec(name, [str(parent)])  # a folder without __init__.py, a compiled module

    def get_filename(self, fullname: str) -> str:
        """Returns the file of a module of the package. Raises ImportError if it has none in Python."""
        place = self._place(fullname)
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if str(file) in self._sources or file.is_file():
                return str(file)
        raise ImportError(f"No module named {fullname!r}", name=fullname)

    def get_data(self, path: str) -> bytes:  # type: ignore[override]  # of Python files, named by str
        """Returns the code of a file, as it was first read."""
        if path not in self._sources:
            self._sources[path] = Path(path).read_bytes()
        return self._sources[path]

    def get_code(self, fullname: str) -> CodeType:
        """Returns the code of a module, with imports of the folder's modules from the package."""
        path = self.get_filename(fullname)
        tree, _ = self._led(path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code

    def _import(self, file: Path) -> ModuleType:
        self.get_data(str(file))
        if self._package not in sys.modules:
            spec = ModuleSpec(self._package, None, is_package=True)
            spec.submodule_search_locations = [str(self._folder)]
            sys.modules[self._package] = module_from_spec(spec)
        name = f"{self._package}.{file.stem.replace('.', '|')}"
        if (found := self.get_filename(name)) != str(file):
            raise ImportError(f"an import of its name finds {found}; rename one of them")
        return import_module(name)

    def _place(self, name: str) -> Path:
        """Returns the path of a module of the package, without its ending; `|` is a dot in a file's name."""
        return self._folder.joinpath(*(part.replace("|", ".") for part in name.split(".")[1:]))

    def _modules(self) -> dict[str, ModuleType]:
        """Returns the package's modules that are imported, by their names."""
        return {name: each for name, each in sys.modules.items() if name.partition(".")[0] == self._package}

    @contextmanager
    def _as_before_if_it_fails(self) -> Iterator[None]:
        with ExitStack() as unless_done:
            unless_done.callback(self._put_back, self._modules(), dict(self._sources))
            yield
            unless_done.pop_all()

    def _put_back(self, modules: Mapping[str, ModuleType], sources: dict[str, bytes]) -> None:
        """Forgets all modules of the package, and all code, but these."""
        self._sources = sources
        for name in self._modules():
            if sys.modules[name] is not modules.get(name):
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:
                    vars(sys.modules[parent]).pop(child, None)
        sys.modules.update(modules)

    def _digests_from(self, path: str) -> Mapping[str, str]:
        found: set[str] = set()
        left = [path]
        while left:
            if (file := left.pop()) in found:
                continue
            found.add(file)
            self.get_data(file)
            with suppress(SyntaxError, ValueError):  # whoever imports it gets an error, and may not mind
                left += [each for name in self._led(file)[1] for each in self._files(name)]
        return {file: digest_of(self._sources[file]) for file in [path, *sorted(found - {path}, key=Path)]}

    def _files(self, name: str) -> Iterator[str]:
        """Yields the files that the import of a module of the package runs, its packages' first."""
        parts = name.split(".")
        for end in range(2, len(parts) + 1):
            with suppress(ImportError):
                yield self.get_filename(".".join(parts[:end]))

    def _led(self, path: str) -> tuple[ast.Module, list[str]]:
        """Returns a file's code, and the names of all that may be modules of the package in its imports."""
        tree = ast.parse(self.get_data(path), path)
        parts = Path(path).parent.relative_to(self._folder).parts
        package = ".".join((self._package, *parts))
        names: list[str] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                own = [alias.name for alias in node.names if self._owns(alias.name)]
                node.names = [each for alias in node.names for each in self._alias(alias)]
                names += [f"{self._package}.{name}" for name in own]
            elif isinstance(node, ast.ImportFrom):
                if not node.level and self._owns(str(node.module)):
                    node.module = f"{self._package}.{node.module}"
                elif not node.level:
                    continue
                with suppress(ImportError):  # it leads out of the package
                    base = resolve_name("." * node.level + (node.module or ""), package)
                    names += [f"{base}.{alias.name}" for alias in node.names]
        return tree, names

    def _alias(self, alias: ast.alias) -> Iterator[ast.alias]:
        """Yields what one name of an import becomes: `a.b` is `PACKAGE.a.b, PACKAGE.a as a`."""
        if not self._owns(alias.name):
            yield alias
            return
        top = alias.name.partition(".")[0]
        pairs = [(alias.name, alias.asname)] if alias.asname else [(alias.name, None), (top, top)]
        for name, called in pairs:
            yield ast.copy_location(ast.alias(f"{self._package}.{name}", called), alias)

    def _owns(self, name: str) -> bool:
        """Whether an import finds a module in the folder first, as Python does in the folder of a script."""
        top = name.partition(".")[0]
        own = None if top in _SHARED else self.find_spec(f"{self._package}.{top}", None)
        if own is None or own.has_location:
            return own is not None
        other = PathFinder.find_spec(top)  # a folder without __init__.py gives way to any module
        return other is None or not other.has_location
