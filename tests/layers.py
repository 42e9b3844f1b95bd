"""Print the layers of `python/mlora`, the imports between its folders, and any import that is not allowed.

Run it as ``python tests/layers.py``. The exit code is 1 when an import runs upwards or in a circle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MLORA = ROOT / "python" / "mlora"

# Top to bottom. A folder imports only from folders below it; folders on one line do not import each other.
LAYERS: list[tuple[str, ...]] = [
    ("cli",),
    ("run", "report"),
    ("sweep",),
    ("queue", "simulate"),
    ("planning", "files"),
    ("engine", "tasks"),
    ("data", "pipeline"),
    ("model", "cluster"),
    ("config", "scheduler"),
    ("memory", "objectives", "offload", "optim"),
]
# Modules beside the folders: some lie below all of them, the entry points above all of them.
BELOW_ALL, ABOVE_ALL = ("errors", "durable", "records", "regular_files"), ("", "__main__")


def python_files(package: Path) -> list[Path]:
    """Returns the Python files of a package, sorted."""
    return sorted(package.rglob("*.py"))


def module_name(path: Path, root: Path) -> str:
    """Returns a file's module name: dotted, from the folder `root` that is on the path."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, root: Path) -> Iterator[str]:
    """Yields what a file imports, anywhere in it: `package.module`, or `package.module.name`."""
    module = module_name(path, root)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = package.split(".")
                parents = parts[: len(parts) - node.level + 1]
                origin = ".".join([*parents, *([origin] if origin else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def module_imports(files: list[Path], root: Path) -> dict[str, set[str]]:
    """Returns, for each module, which others of `files` it imports."""
    modules = {module_name(path, root) for path in files}
    found: dict[str, set[str]] = {}
    for path in files:
        module = module_name(path, root)
        names = imported_names(path, root)
        others = {name if name in modules else name.rpartition(".")[0] for name in names}
        found[module] = {other for other in others if other in modules and other != module}
    return found


def folder_imports(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns, for each folder of `mlora`, which other folders it imports from."""
    arrows: dict[str, set[str]] = {}
    for module, others in imports.items():
        mine = arrows.setdefault(folder_of(module), set())
        mine |= {folder_of(other) for other in others} - {folder_of(module)}
    return arrows


def folder_of(module: str) -> str:
    """Returns the folder of `mlora` in which a module lies; of one beside the folders, its own name."""
    return module.split(".")[1] if "." in module else ""


def circle(arrows: Mapping[str, set[str]]) -> list[str]:
    """Returns names that import each other in a circle and what imports them; empty if there is no circle."""
    left = {name: set(others) for name, others in arrows.items()}
    while left:
        free = [name for name, others in left.items() if not others & set(left)]
        if not free:
            return sorted(left)
        left = {name: others for name, others in left.items() if name not in free}
    return []


def floor_of(folder: str) -> int:
    """Returns a folder's floor: 0 for what lies below all, len(LAYERS) for `cli`.

    Raises:
        ValueError: the folder stands in no layer.
    """
    if folder in BELOW_ALL:
        return 0
    if folder in ABOVE_ALL:
        return len(LAYERS) + 1
    for index, folders in enumerate(LAYERS):
        if folder in folders:
            return len(LAYERS) - index
    raise ValueError(f"python/mlora/{folder} stands in no layer; add it to LAYERS in tests/layers.py")


def upward_imports(arrows: Mapping[str, set[str]]) -> list[str]:
    """Returns each import that does not run down, as a line."""
    return [
        f"{folder or 'mlora'} imports {other}, which does not lie below it"
        for folder, others in sorted(arrows.items())
        for other in sorted(others)
        if floor_of(other) >= floor_of(folder)
    ]


def main() -> int:
    """Prints the layers and the arrows between them; returns the exit code."""
    files = python_files(MLORA)
    arrows = folder_imports(module_imports(files, MLORA.parent))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    for index, folders in enumerate(LAYERS):
        for folder in folders:
            below = ", ".join(sorted(arrows[folder] - set(BELOW_ALL)))
            print(f"{len(LAYERS) - index:3}  {folder:11} {below}")
    inside = sum(len(others - set(BELOW_ALL)) for folder, others in arrows.items() if folder not in ABOVE_ALL)
    faults = upward_imports(arrows)
    print(f"{len(LAYERS)} floors, {inside} arrows between folders, {lines} lines in {len(files)} files")
    for line in faults:
        print(line, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
