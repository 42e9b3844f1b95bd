"""The check of a built wheel refuses libraries that need a newer system or name folders of the builder's."""

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parents[1] / ".ci"
pytestmark = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("gcc", "nm", "readelf")), reason="needs gcc and binutils"
)


@pytest.fixture
def build_wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    spec = importlib.util.spec_from_file_location("build_wheels", CI / "build_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel_of(folder: Path, code: str, *flags: str) -> Path:
    """A wheel whose two libraries are both made of this C code."""
    source = folder / "code.c"
    source.write_text(code)
    with zipfile.ZipFile(folder / "some.whl", "w") as archive:
        for name in ("_C.cpython-311-x86_64-linux-gnu.so", "libmlora_ops.so"):
            command = ["gcc", "-shared", "-fPIC", "-w", str(source), "-o", str(folder / name), *flags]
            subprocess.run(command, check=True)
            archive.write(folder / name, f"mlora_ext/{name}")
    return folder / "some.whl"


def test_symbols_with_versions_and_those_of_torch_pass(
    build_wheels: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "int puts(); int torch_call(); int PyOne(); f() { puts(); torch_call(); PyOne(); }"
    build_wheels.check(wheel_of(tmp_path, code), tmp_path / "unpacked")
    told = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["_C.cpython-311-x86_64-linux-gnu.so", "libmlora_ops.so"]


def test_a_symbol_without_a_version_is_refused(build_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, "int puts(); int newest(); f() { puts(); newest(); }")
    with pytest.raises(SystemExit, match=r"_C.* needs symbols that an old system may lack: \['newest'\]"):
        build_wheels.check(wheel, tmp_path / "unpacked")


def test_a_path_to_libraries_is_refused(build_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, "int puts(); f() { puts(); }", "-Wl,-rpath,/somewhere")
    with pytest.raises(SystemExit, match=r"_C.* names a folder of this machine"):
        build_wheels.check(wheel, tmp_path / "unpacked")


def test_a_missing_library_is_refused(build_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mlora_ext/libmlora_ops.so", b"")
    with pytest.raises(SystemExit, match=r"some.whl holds \['libmlora_ops.so'\]"):
        build_wheels.check(wheel, tmp_path / "unpacked")
