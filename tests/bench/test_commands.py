"""`mlora bench`, the script for a machine with a GPU, and the program for the sanitizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mlora.cli.app import app
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"


def test_mlora_bench_passes_its_arguments_on() -> None:
    done = CliRunner().invoke(app, ["bench", "--help"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.startswith("usage: mlora bench")
    assert "linears" in done.stdout
    done = CliRunner().invoke(app, ["bench", "nonsense"], catch_exceptions=False)
    assert done.exit_code == 2


def test_without_the_source_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlora.cli.app.BENCHMARKS", tmp_path)
    done = CliRunner().invoke(app, ["bench", "linears"], catch_exceptions=False)
    assert done.exit_code == 1
    assert done.stderr.startswith(
        "error: bench: the installed package holds no benchmarks; in a source checkout"
    )
    assert len(done.stderr.splitlines()) == 1


def test_sanitize_checks_and_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu import sanitize

    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--device", "cpu"])
    assert sanitize.main() == 0
    assert capsys.readouterr().out.endswith("12 cases, 0 wrong\n")
    monkeypatch.setitem(sanitize.ALLOWED, __import__("torch").bfloat16, 1e-9)
    assert sanitize.main() == 1
    assert "12 cases, 4 wrong" in capsys.readouterr().out
    monkeypatch.setitem(sanitize.BACKENDS, "cpu", ())
    assert sanitize.main() == 1
    assert "nothing was checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected a folder for the results"),
        (["--device", "tpu", "x"], "expected cuda or cpu, got tpu"),
        (["a", "b"], "expected one folder, got a and b"),
        (["--devic", "cpu", "a"], "--devic: no such option"),
        (["a", "--python"], "--python: expected a value"),
        (
            ["--phases", "build,testing", "a"],
            "--phases: no phase 'testing'; there are build,odd shapes,tests",
        ),
    ],
)
def test_script_refuses(arguments: list[str], expected: str, tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_script_on_a_cpu(tmp_path: Path) -> None:
    command = [SCRIPT, "--device", "cpu", "--python", sys.executable, "--commit", "c0ffee", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    logs = ["pipeline.log", "sanitizer.log", "tests.log"]
    assert files == sorted(["pipeline", *logs, "suite.json", "suite.png", "suite.txt", "summary.txt"])
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert summary.startswith("commit c0ffee\n")
    table = [" ".join(line.split()[:3]) for line in summary.splitlines()]
    assert any(line.startswith("tests ok") for line in table)
    assert "odd shapes ok" in table
    assert any(line.startswith("suite ok") for line in table)
    assert done.stdout.endswith(summary), "the table comes last"
    data = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert data["machine"]["commit"].startswith("c0ffee")


def test_earlier_results_stay_where_there_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "suite.json").write_text("{}")
    command = [SCRIPT, "--device", "cpu", "--python", "/bin/false", tmp_path]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1
    assert (tmp_path / "suite.json").exists()


def test_script_goes_on_after_a_failure(tmp_path: Path) -> None:
    """A Python whose pytest and programs fail: every phase is tried, and the exit code is 1."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = - ] && { echo about; exit 0; }\necho broken; exit 7\n')
    python.chmod(0o755)
    done = subprocess.run(
        [SCRIPT, "--device", "cpu", "--python", python, tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert [line.split()[0] for line in failed] == ["odd", "tests", "pipeline", "suite"]
    assert all("exit code 7" in line for line in failed)


def test_phases_that_were_chosen(tmp_path: Path) -> None:
    """Others do not run and keep their results; a selection that runs nothing is an error."""
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text('#!/bin/sh\n[ "$1" = - ] && { echo about; exit 0; }\necho broken; exit 7\n')
    python.chmod(0o755)
    out.mkdir()
    for name in ("suite.json", "tests.log"):
        (out / name).write_text("earlier")
    command = [SCRIPT, "--device", "cpu", "--python", python, out, "--phases"]
    done = subprocess.run([*command, "tests,odd shapes"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
    assert [line.split()[0] for line in failed] == ["odd", "tests"]
    assert (out / "suite.json").read_text() == "earlier"
    assert "earlier" not in (out / "tests.log").read_text()
    done = subprocess.run([*command, "launches,racecheck"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "none of these phases serves --device cpu: launches,racecheck" in done.stderr


FAKE_PYTHON = """#!/bin/sh
here=$(dirname "$0")
if [ "$1" = - ]; then printf 'Python, torch\\na GPU, capability 9.0\\n90a\\n'; exit 0; fi
echo "$CMAKE_ARGS|$PYTORCH_NO_CUDA_MEMORY_CACHING|$*" >>"$here/calls"
case "$CMAKE_ARGS" in *CUDA=ON*) exit "$(cat "$here/cuda_build")" ;; esac
"""
FAKE_SANITIZER = """#!/bin/sh
case "$2" in memcheck) shift 4; exec "$@" ;; esac
echo "========= Error: Device not supported. Please refer to the documentation"; exit 1
"""


@pytest.mark.parametrize("cuda_build", [0, 1])
def test_script_for_a_gpu_with_stand_ins(cuda_build: int, tmp_path: Path) -> None:
    """Which commands it would run, and what it makes of their exit codes; nothing here needs a GPU."""
    for name, text in (("python", FAKE_PYTHON), ("compute-sanitizer", FAKE_SANITIZER)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "cuda_build").write_text(str(cuda_build))
    done = subprocess.run(
        ["env", f"PATH={tmp_path}:/usr/bin:/bin", SCRIPT, "--python", tmp_path / "python", tmp_path / "out"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = [line.split("|") for line in (tmp_path / "calls").read_text().splitlines()]
    builds = [options for options, _, command in calls if command.startswith("setup.py build_ext --inplace")]
    assert builds[0] == "-DMLORA_WITH_CUDA=ON -DMLORA_CUDA_ARCHITECTURES=90a"
    assert builds[1:] == (["-DMLORA_WITH_CUDA=OFF"] if cuda_build else [])
    programs = [(cache, command.split()[0]) for _, cache, command in calls[len(builds) :]]
    assert programs == [
        ("", "bench/sanitize.py"),
        ("", "-c"),
        *[("", "-m")] * 5,
        ("", "bench/gpu_launches.py"),
        ("", "bench/suite.py"),
        ("", "-m"),
        ("1", "bench/sanitize.py"),
    ]
    _, _, tests, kinds, runs, limit, pipeline, _, suite, suite_tests, sanitizer = [
        command for *_, command in calls[len(builds) :]
    ]
    assert tests.startswith("-m pytest -m gpu ")
    assert kinds.startswith("-m pytest --device cuda -m not nightly and not gpu ")
    assert "tests/mlora/run/test_all_kinds.py" in runs
    assert all((ROOT / path).exists() for path in (kinds + " " + runs).split() if path.startswith("tests/"))
    assert limit.endswith("tests/mlora/planning/test_limit_gpu.py")
    assert "--nproc-per-node 2 bench/pipeline_overlap.py --out" in pipeline
    assert suite.startswith("bench/suite.py linears adapters decoder ablation operators step --check")
    assert suite_tests.endswith("tests/bench/test_suite_gpu.py")
    assert sanitizer == "bench/sanitize.py"
    table = [" ".join(line.split()[:3]) for line in done.stdout.splitlines()]
    assert f"build sm_90a {'FAILED' if cuda_build else 'ok'}" in table
    assert any(line.startswith("memcheck ok") for line in table)
    assert "racecheck NOT RUN" in table, "a device that it cannot watch is no failure"
    assert done.returncode == cuda_build
