"""The scripts of `.ci`: wheels that need a newer system are refused; a matrix that ran nothing fails."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CI = Path(__file__).resolve().parent.parent / ".ci"
NEEDS_TOOLS = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("gcc", "nm", "readelf")), reason="needs gcc and binutils"
)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    spec = importlib.util.spec_from_file_location(f"ci_{name}", CI / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"ci_{name}", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build_wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("build_wheels", monkeypatch)


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = script("matrix", monkeypatch)
    monkeypatch.setattr(module, "LOGS", tmp_path)
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


@NEEDS_TOOLS
def test_symbols_with_versions_and_those_of_torch_pass(
    build_wheels: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "int puts(); int torch_call(); int PyOne(); f() { puts(); torch_call(); PyOne(); }"
    build_wheels.check(wheel_of(tmp_path, code), tmp_path / "unpacked")
    told = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["_C.cpython-311-x86_64-linux-gnu.so", "libmlora_ops.so"]


@NEEDS_TOOLS
@pytest.mark.parametrize(
    ("calls", "flags", "message"),
    [
        ("newest();", [], r"_C.* needs symbols that an old system may lack: \['newest'\]"),
        ("", ["-Wl,-rpath,/somewhere"], r"_C.* names a folder of this machine"),
    ],
    ids=["a symbol without a version", "a path to libraries"],
)
def test_libraries_that_are_refused(
    build_wheels: ModuleType, tmp_path: Path, calls: str, flags: list[str], message: str
) -> None:
    wheel = wheel_of(tmp_path, f"int puts(); int newest(); f() {{ puts(); {calls} }}", *flags)
    with pytest.raises(SystemExit, match=message):
        build_wheels.check(wheel, tmp_path / "unpacked")


@NEEDS_TOOLS
def test_a_missing_library_is_refused(build_wheels: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mlora_ext/libmlora_ops.so", b"")
    with pytest.raises(SystemExit, match=r"some.whl holds \['libmlora_ops.so'\]"):
        build_wheels.check(wheel, tmp_path / "unpacked")


def end(matrix: ModuleType, patch: pytest.MonkeyPatch, profiles: list[str], flags: str, uses: str) -> int:
    """The exit code on a processor of some flags, whose PyTorch uses something; all tests pass."""

    def passed(command: list[str], **more: Any) -> SimpleNamespace:
        if "stdout" in more:
            more["stdout"].write("== 3 passed in 1.0s ==\n")
        return SimpleNamespace(returncode=0, stdout=f"torch {uses}\n")

    patch.setattr(matrix, "processor_flags", lambda: set(flags.split()))
    patch.setattr(subprocess, "run", passed)
    only = [word for name in profiles for word in ("--only", name)]
    patch.setattr(sys, "argv", ["matrix.py", *only])
    code: int = matrix.main()
    return code


@pytest.mark.parametrize(
    ("profiles", "flags", "uses", "code", "told"),
    [
        (["avx2"], "avx2 fma", "AVX2", 0, "3 passed"),
        (["avx2"], "avx2 fma", "DEFAULT", 1, "  ATEN_CPU_CAPABILITY=avx2 was ignored: PyTorch uses DEFAULT"),
        (["oldest"], "", "DEFAULT", 0, "3 passed"),
        (["plain"], "", "AVX512", 0, "3 passed"),
        (["avx512"], "avx2 fma", "AVX2", 1, "no profile was run"),
        (["avx512", "plain"], "avx2 fma", "AVX2", 0, "avx512: not run, this processor has no avx512bw"),
    ],
)
def test_what_counts_as_passed(
    matrix: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    profiles: list[str],
    flags: str,
    uses: str,
    code: int,
    told: str,
) -> None:
    assert end(matrix, monkeypatch, profiles, flags, uses) == code
    assert told in capsys.readouterr().out
