"""The house rules that a machine can read: which part may import which, and what no file may do."""

import ast
import subprocess
import sys
from pathlib import Path

import layers
import pytest

ROOT = layers.ROOT
MLORA, EXT, BENCH = layers.MLORA.path, layers.EXT.path, ROOT / "bench"
PRODUCT = [*layers.python_files(EXT), *layers.python_files(MLORA)]

# The first looks at what the user has set in the environment that the processes it starts inherit; the
# second sets what a library can be told by its environment only; the third asks for the user's cache folder;
# the fourth reads what a launcher says.
READS_ENVIRONMENT = {
    "mlora.cluster.launch",
    "mlora.cluster.allocators",
    "mlora.run.machine_choice",
    "mlora.cluster.world",
}

# Where there is no field to read: of safetensors' error of a full disk, Transformers' of a missing argument,
# and C++'s name of an argument. `device` leaves out what callers in Python may do.
READS_TEXTS = {
    "mlora_ext.frozen.base_gemm",
    "mlora.cluster.device",
    "mlora.store.new_folder",
    "mlora.optim.schedules",
}
CUTS = {"removeprefix", "removesuffix", "replace", "find", "index", "startswith", "endswith"}
CUTS |= {"partition", "rpartition", "split", "rsplit"}


def module_name(path: Path) -> str:
    return layers.module_name(path, MLORA.parent if path.is_relative_to(MLORA) else ROOT)


@pytest.mark.parametrize(
    ("package", "most"), [(layers.MLORA, 80), (layers.EXT, 35)], ids=["mlora", "mlora_ext"]
)
def test_imports_run_down_the_layers(package: layers.Package, most: int) -> None:
    arrows = layers.arrows_of(package)
    assert layers.upward_imports(arrows, package) == []
    assert layers.inside(arrows, package) <= most


@pytest.mark.parametrize(
    ("package", "root"),
    [(MLORA, MLORA.parent), (EXT, ROOT), (BENCH, BENCH)],
    ids=["mlora", "mlora_ext", "bench"],
)
def test_no_module_imports_one_that_imports_it(package: Path, root: Path) -> None:
    assert layers.circle(layers.module_imports(layers.python_files(package), root)) == []


def test_the_check_of_layers_sees_what_it_forbids() -> None:
    assert layers.upward_imports({"memory": {"scheduler"}}) == [
        "memory imports scheduler, which does not lie below it"
    ]
    assert layers.upward_imports({"sweep": {"simulate"}, "errors": {"config"}}) != []
    assert layers.circle({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="python/mlora/attic stands in no layer"):
        layers.upward_imports({"attic": set(), "cli": {"attic"}})


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module_name(path))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_base_brings_code() -> None:
    """Transformers' Auto classes ask the user whether to run a base's own code, unless they are told."""
    for path in layers.python_files(MLORA):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(called := node.func, ast.Attribute):
                config = "GenerationConfig" in ast.unparse(called) or "HfQuantizer" in ast.unparse(called)
                loads = called.attr in ("from_pretrained", "from_config") and not config
                told = any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
                assert not loads or told or "PeftModel" in ast.unparse(called), f"{path}:{node.lineno}"


def test_operator_package_needs_only_torch() -> None:
    allowed = {"torch", "triton", "mlora_ext", "__future__"}
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


def peelings(tree: ast.AST) -> list[str]:
    """Returns where the text of a caught error is taken apart, but for lines, spaces and a full stop."""

    def is_text(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in texts
        called = isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "first_line")
        return called and isinstance(first := node.args[0], ast.Name) and first.id == handler.name

    def cuts(node: ast.AST) -> bool:
        if isinstance(node, ast.Compare):
            return any(isinstance(each, ast.In | ast.NotIn) for each in node.ops) and any(
                map(is_text, node.comparators)
            )
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        if ast.unparse(node.func).startswith("re."):
            return any(map(is_text, node.args))
        by = [ast.literal_eval(each) for each in node.args if isinstance(each, ast.Constant)]
        plain = by in ([], ["\n"], ["."]) and len(by) == len(node.args)
        return node.func.attr in CUTS and not plain and any(map(is_text, ast.walk(node.func.value)))

    found = []
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name:
            texts = set[str]()
            for node in ast.walk(handler):
                if isinstance(node, ast.Assign) and is_text(node.value):
                    texts |= {each.id for each in node.targets if isinstance(each, ast.Name)}
            found += [ast.unparse(node) for node in ast.walk(handler) if cuts(node)]
    return found


def test_nobody_takes_the_text_of_an_error_apart() -> None:
    """Errors have fields for it: see `NamedRunError` and `mlora_ext.errors`."""
    found = {module_name(path): peelings(ast.parse(path.read_text())) for path in PRODUCT}
    assert {name for name, cut in found.items() if cut} == READS_TEXTS


@pytest.mark.parametrize(
    ("line", "forbidden"),
    [
        ("text = str(e).removeprefix('a: ')", True),
        ("text = first_line(e); text = text.partition(': ')[2]", True),
        ("re.sub('a', '', str(e))", True),
        ("'memory' in str(e)", True),
        ("e.name.removeprefix('a')", False),
        ("' '.join(str(e).split()).removesuffix('.')", False),
        ("str(e).partition('\\n')[0]", False),
    ],
)
def test_the_check_of_errors_sees_what_it_forbids(line: str, forbidden: bool) -> None:
    code = f"try:\n    pass\nexcept ValueError as e:\n    {line}\n"
    assert bool(peelings(ast.parse(code))) is forbidden


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
