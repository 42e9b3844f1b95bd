"""Print the layers of both packages, the imports between their folders, and any import that is not allowed.

Run it as ``python tests/layers.py``. The exit code is 1 when an import runs upwards or in a circle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Package:
    """A package whose folders form layers. Modules beside the folders lie below or above all of them.

    Attributes:
        path: of the package.
        layers: top to bottom. A folder imports only from folders below it; folders on one line do not import
            each other.
        below: modules below all folders.
        above: the entry points.
    """

    path: Path
    layers: tuple[tuple[str, ...], ...]
    below: tuple[str, ...]
    above: tuple[str, ...] = ("", "__main__")


MLORA = Package(
    ROOT / "python" / "mlora",
    (
        ("cli",),
        ("run", "report"),
        ("sweep", "simulate"),
        ("planning", "store"),
        ("engine", "tasks"),
        ("data", "pipeline"),
        ("model", "cluster"),
        ("config", "scheduler"),
        ("memory",),
        ("objectives", "offload", "optim"),
    ),
    ("errors", "durable", "records", "regular_files"),
)
EXT = Package(
    ROOT / "mlora_ext",
    (
        ("convert",),
        ("interop", "start"),
        ("targets",),
        ("layers",),
        ("routing",),
        ("adapters",),
        ("ops",),
        ("backends",),
        ("frozen",),
    ),
    ("errors", "library", "never_compiled", "once_differentiable", "out_of_memory", "upload", "warn_caller"),
)


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
    """Returns, for each folder of a package, which other folders it imports from."""
    arrows: dict[str, set[str]] = {}
    for module, others in imports.items():
        mine = arrows.setdefault(folder_of(module), set())
        mine |= {folder_of(other) for other in others} - {folder_of(module)}
    return arrows


def folder_of(module: str) -> str:
    """Returns the folder of its package in which a module lies; of one beside the folders, its own name."""
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


def floor_of(folder: str, package: Package = MLORA) -> int:
    """Returns a folder's floor: 0 for what lies below all, the number of layers for the topmost folders.

    Raises:
        ValueError: the folder stands in no layer.
    """
    if folder in package.below:
        return 0
    if folder in package.above:
        return len(package.layers) + 1
    for index, folders in enumerate(package.layers):
        if folder in folders:
            return len(package.layers) - index
    where = package.path.relative_to(ROOT) / folder
    raise ValueError(f"{where} stands in no layer; add it to tests/layers.py")


def upward_imports(arrows: Mapping[str, set[str]], package: Package = MLORA) -> list[str]:
    """Returns each import that does not run down, as a line."""
    return [
        f"{folder or package.path.name} imports {other}, which does not lie below it"
        for folder, others in sorted(arrows.items())
        for other in sorted(others)
        if floor_of(other, package) >= floor_of(folder, package)
    ]


def arrows_of(package: Package) -> dict[str, set[str]]:
    """Returns what each folder of a package imports from."""
    return folder_imports(module_imports(python_files(package.path), package.path.parent))


def inside(arrows: Mapping[str, set[str]], package: Package) -> int:
    """Returns the number of arrows between folders."""
    return sum(
        len(others - set(package.below)) for folder, others in arrows.items() if folder not in package.above
    )


def main() -> int:
    """Prints the layers and the arrows between them; returns the exit code."""
    faults = []
    for package in (MLORA, EXT):
        files, arrows = python_files(package.path), arrows_of(package)
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        print(package.path.name)
        for folder in (folder for folders in package.layers for folder in folders):
            others = ", ".join(sorted(arrows[folder] - set(package.below)))
            print(f"{floor_of(folder, package):3}  {folder:11} {others}")
        floors, between = len(package.layers), inside(arrows, package)
        print(f"{floors} floors, {between} arrows between folders, {lines} lines in {len(files)} files")
        faults += upward_imports(arrows, package)
    for line in faults:
        print(line, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
