"""Finds the files of a folder that a Python file imports, by the import statements in it and in them.

What a process has imported before makes no difference, so digests of these files can be compared later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from importlib.util import resolve_name
from pathlib import Path


def imported_files(
    source: bytes, folder: Path, tops: set[str], sources: MutableMapping[Path, bytes]
) -> set[Path]:
    """Returns the files of `folder` that a file of it imports, also through one another.

    Args:
        source: the file's code.
        folder: an absolute path.
        tops: the modules and packages of the folder that count.
        sources: the code of files that were read; those that are read now join it.
    """
    found: set[Path] = set()
    left = list(_imports(source, ""))
    while left:
        name = left.pop()
        if name.partition(".")[0] not in tops:
            continue
        for file in set(_files(name, folder)) - found:
            found.add(file)
            if file not in sources:
                sources[file] = file.read_bytes()
            left += _imports(sources[file], ".".join(file.parent.relative_to(folder).parts))
    return found


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yields the absolute names of all that may be a module in import statements of `package`'s code."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # whoever imports it gets an error, and may not mind
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # it leads out of the package
                base = resolve_name("." * node.level + (node.module or ""), package or None)
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _files(name: str, folder: Path) -> Iterator[Path]:
    """Yields the files that the import of a module runs, its packages' first."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:end])
        choices = (path / "__init__.py", path.parent / f"{path.name}.py")
        yield from [file for file in choices if file.is_file()][:1]
