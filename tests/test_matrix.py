"""The matrix of instruction sets: it fails where it ran nothing, or where a switch was ignored."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "matrix.py"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_matrix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ci_matrix", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOGS", tmp_path)
    return module


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
