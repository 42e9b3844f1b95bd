"""The house rules that a machine can read: which part may import which, and what no file may do."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = sorted([*(ROOT / "mlora_ext").rglob("*.py"), *(ROOT / "python" / "mlora").rglob("*.py")])

# `Sample` is the currency between a run's data and the engine.
ALLOWED_BACK = {
    ("mlora.data.packing", "mlora.data.dataset.Sample"),
    ("mlora.engine.engine", "mlora.data.dataset.Sample"),
    ("mlora.engine.batcher", "mlora.data.dataset.Sample"),
}

# The first looks at what the user has set in the environment that the processes it starts inherit; the
# second sets what a library can be told by its environment only.
READS_ENVIRONMENT = {"mlora.cluster.launch", "mlora.cluster.onednn_caches"}


def module_name(path: Path) -> str:
    base = ROOT / "python" if path.is_relative_to(ROOT / "python") else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                origin = ".".join([*parents, *([origin] if origin else [])])
            found.update(f"{origin}.{alias.name}" for alias in node.names)
    return found


def unit_of(module: str) -> str:
    """The folder of `mlora` in which a module lies, or the module itself."""
    return ".".join(module.split(".")[:2])


def test_no_folder_imports_from_one_that_imports_from_it() -> None:
    modules = {module_name(path) for path in PRODUCT if path.is_relative_to(ROOT / "python")} - {"mlora"}
    arrows: dict[str, set[str]] = {unit_of(module): set() for module in modules}
    for path in PRODUCT:
        module = module_name(path)
        if module not in modules:
            continue
        for name in imports(path):
            other = name if name in modules else name.rpartition(".")[0]
            if other in modules and unit_of(other) != unit_of(module) and (module, name) not in ALLOWED_BACK:
                arrows[unit_of(module)].add(unit_of(other))
    while arrows:
        free = [unit for unit, others in arrows.items() if not others & set(arrows)]
        assert free, f"a circle among {sorted(arrows)}"
        arrows = {unit: others for unit, others in arrows.items() if unit not in free}


def test_operator_package_needs_only_torch() -> None:
    allowed = {"torch", "triton", "mlora_ext", "__future__"}
    import sys

    for path in (ROOT / "mlora_ext").rglob("*.py"):
        tree = ast.parse(path.read_text())
        guarded = {
            child
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            for child in ast.walk(node)
        }
        for node in tree.body:
            if node in guarded or not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level:
                continue
            for name in names:
                root = name.split(".")[0]
                assert root in allowed or root in sys.stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", PRODUCT, ids=module_name)
def test_no_environment_no_broad_except(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            name = node.type.id if isinstance(node.type, ast.Name) else ""
            assert node.type is not None, f"bare except in line {node.lineno}"
            assert name not in ("Exception", "BaseException"), f"broad except in line {node.lineno}"
        if isinstance(node, ast.Attribute) and module_name(path) not in READS_ENVIRONMENT:
            assert node.attr not in ("environ", "getenv"), f"line {node.lineno} reads the environment"


def test_no_utils_and_no_code_in_init() -> None:
    for path in PRODUCT:
        assert path.name != "utils.py", path
        if path.name == "__init__.py":
            for node in ast.parse(path.read_text()).body:
                is_version = isinstance(node, ast.Assign)
                is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                is_lazy = isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
                is_lazy = is_lazy or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
                assert isinstance(node, ast.Import | ast.ImportFrom) or is_version or is_doc or is_lazy, path


def test_cmake_is_the_only_list_of_sources() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    for source in (ROOT / "csrc").rglob("*.c*"):
        if source.suffix in (".cpp", ".cu"):
            assert str(source.relative_to(ROOT)) in text or source.name in text, f"{source} is never built"
    assert ".cpp" not in (ROOT / "setup.py").read_text()


def test_no_file_holds_conflict_markers() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if name.endswith((".py", ".md", ".h", ".cpp", ".cu", ".cuh", ".txt", ".sh", ".toml", ".yaml")):
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
            assert not [line for line in lines if line.startswith(("<" * 7 + " ", ">" * 7 + " "))], name
