"""`bench/gpu.sh` and what it runs, without a GPU; and the kit that it runs from."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: OUT_FOLDER"),
        (["--kit", "missing", "out"], "missing holds no kit; `make gpu-kit` builds one"),
        (
            ["--dry", "--phases", "suite,testing", "out"],
            "no phase 'testing'; there are libraries,",
        ),
    ],
)
def test_script_refuses(arguments: list[str], expected: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [SCRIPT, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_phase_dry(tmp_path: Path) -> None:
    from gpu import call

    assert call.main(["--dry", "--commit", "c0ffee", "--limit", "1100", str(tmp_path)]) == 0
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.startswith("commit c0ffee\n")
    every = dict.fromkeys(phase.name for phase in call.phases(tmp_path, 1))
    assert {name for name in every if re.search(f"^{name} +ok ", summary, re.MULTILINE)} == set(every)
    assert "seven linears of quick, fused" in summary
    assert json.loads((tmp_path / "suite.json").read_text())["machine"]["commit"].startswith("c0ffee")
    assert len((tmp_path / "launches.jsonl").read_text().splitlines()) == 18


def phases_of(monkeypatch: pytest.MonkeyPatch, *programs: tuple[str, str, str]) -> Any:
    """`gpu.call` with other phases: name, program, what must show."""
    from gpu import call

    made = [
        call.Phase(name, 5, f"{name}.log", shows, command="", dry=f'-c "{program}"')
        for name, program, shows in programs
    ]
    monkeypatch.setattr(call, "phases", lambda kit, processes: iter(made))
    return call


HANGS = "import os, time; os.fork(); print('begins', os.getpid()); time.sleep(99)"


def test_what_fails_or_hangs_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = phases_of(
        monkeypatch,
        ("hangs", HANGS, "begins"),
        ("fails", "print('broken'); exit(7)", "broken"),
        ("silent", "pass", "result .*"),
        ("right", "print('result 1')", "result .*"),
    )
    assert call.main(["--dry", str(tmp_path)]) == 1
    summary = (tmp_path / "summary.txt").read_text()
    states = re.findall(r"^(\w+) +(ok|FAILED|TIMEOUT) +\d+s *(.*)", summary, re.MULTILINE)
    assert states == [
        ("hangs", "TIMEOUT", "after 5 s, see hangs.log"),
        ("fails", "FAILED", "exit code 7, see fails.log"),
        ("silent", "FAILED", "nothing matches result .*, see silent.log"),
        ("right", "ok", ""),
    ]
    assert "right: result 1" in summary
    begun = re.findall(r"^begins (\d+)", (tmp_path / "hangs.log").read_text(), re.MULTILINE)
    assert len(begun) == 2, "lines that came before the end stay"
    for process in begun:  # gone, or a child whose end nobody has collected
        status = Path(f"/proc/{process}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()


def test_phases_that_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not run and keep their results; where no time is left, none begins."""
    call = phases_of(monkeypatch, ("one", "print(1)", "1"), ("two", "print(2)", "2"))
    for name in ("one.log", "two.log"):
        (tmp_path / name).write_text("earlier")
    assert call.main(["--dry", "--phases", "two", str(tmp_path)]) == 0
    assert (tmp_path / "one.log").read_text() == "earlier"
    assert "earlier" not in (tmp_path / "two.log").read_text()
    assert call.main(["--dry", "--limit", "4", str(tmp_path)]) == 1
    assert (tmp_path / "summary.txt").read_text().count("no time left") == 2


def test_earlier_results_stay_where_there_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import call

    (tmp_path / "kit.json").write_text('{"commit": "c0ffee"}')
    (tmp_path / "checks.log").write_text("earlier")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="this torch sees no CUDA device"):
        call.main(["--kit", str(tmp_path), str(tmp_path)])
    assert (tmp_path / "checks.log").read_text() == "earlier"


@pytest.mark.parametrize(
    ("says", "state"),
    [("Error: Device not supported", "NOT RUN"), ("ERROR SUMMARY: 0 errors", "ok"), (None, "NOT RUN")],
)
def test_sanitizers(says: str | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import call

    if says is None:
        monkeypatch.setattr(call.shutil, "which", lambda name, path: None)
    else:
        program = tmp_path / "compute-sanitizer"
        program.write_text(f"#!/bin/sh\necho '{says}'\n{'exit 1' if 'Error' in says else ''}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "kit.json").write_text('{"commit": "c0ffee"}')
    monkeypatch.setattr(call, "about", lambda dry, commit: [])
    options = ["--kit", str(tmp_path), "--phases", "memcheck,racecheck", str(tmp_path)]
    assert call.main(options) == 0
    assert (tmp_path / "summary.txt").read_text().count(state) == 2


def test_commands_on_a_gpu(tmp_path: Path) -> None:
    """Variants in turn, base first and last; every file that a command names is there."""
    from gpu import call

    for name in ("base", "old", "deep"):
        library = tmp_path / "variants" / name / "mlora_ext/libmlora_ops.so"
        library.parent.mkdir(parents=True)
        library.touch()
    found = list(call.phases(tmp_path, 4))
    turns = [re.findall(r"variants/(\w+)/", phase.command) for phase in found if phase.name == "launches"]
    assert turns == [["base"], ["base"], ["deep"], ["old"], ["base"]]
    for phase in found:
        for path in re.findall(r"(?:bench|tests|examples)/[\w/]+\.\w+", f"{phase.command} {phase.dry}"):
            assert (ROOT / path).exists(), path
        for name in re.findall(r"(?:-m bench|bench/__main__.py) (\S+)", f"{phase.command} {phase.dry}"):
            assert f'    "{name}": (' in (ROOT / "bench/__main__.py").read_text(), name
    from gpu import kit

    planned = ",".join(kit.CALLS.values()).split(",")
    assert sorted(set(planned)) == sorted({phase.name for phase in found})


def test_commands_of_the_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu import kit

    commands: list[tuple[str, str]] = []

    def record(command: list[object], **options: Any) -> None:
        commands.append((" ".join(map(str, command)), options.get("env", {}).get("CMAKE_ARGS", "")))
        if "archive" in command:
            shutil.make_archive(str(tmp_path / "build/old"), "tar", ROOT, "mlora_ext/ops")

    monkeypatch.setattr(kit, "run", record)
    monkeypatch.setattr(kit, "BUILD", tmp_path / "build")
    variants = {"base": "", "old": "HEAD", "deep": "-DSTAGES=4"}
    size = kit.build(tmp_path / "kit", variants, sys.executable, wheels=True)
    assert commands[0][0].startswith("nvcc ")
    assert "sm_90a" in commands[0][0]
    assert commands[0][0].endswith(f"-o {tmp_path}/kit/products.so")
    builds = [(command, options) for command, options in commands if "build_ext" in command]
    assert [re.search(r"variants/(\w+)", command)[1] for command, _ in builds] == list(variants)  # type: ignore[index]
    assert all("'-DMLORA_CUDA_ARCHITECTURES=90a'" in options for _, options in builds)
    assert "'-DCMAKE_CUDA_FLAGS=-DSTAGES=4'" in builds[2][1]
    assert f"{tmp_path}/build/old/setup.py" in builds[1][0]
    assert "pydantic==" in commands[-1][0]
    assert "mlora_ext" not in commands[-1][0]
    files = {str(path.relative_to(tmp_path / "kit")) for path in (tmp_path / "kit").rglob("*")}
    assert {"call-1.sh", "call-2.sh", "call-3.sh", "kit.json", "variants/base/mlora_ext/library.py"} <= files
    assert 0 < size < kit.LARGEST


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_kit(tmp_path: Path) -> None:
    """What is built loads here, too: it needs no library of CUDA."""
    command = [sys.executable, ROOT / "bench/__main__.py", "gpu-kit", tmp_path / "kit", "--no-wheels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, done.stdout + done.stderr
    program = "import mlora_ext.library as found; print(found.LIBRARY)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "kit/variants/base")}
    told = [sys.executable, "-c", program]
    loaded = subprocess.run(told, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert loaded.stdout.strip() == str(tmp_path / "kit/variants/base/mlora_ext/libmlora_ops.so")


def test_launches_and_graph_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu import graph, launches

    monkeypatch.setattr(launches, "CASES", launches.CASES[-2:])
    monkeypatch.setattr(sys, "argv", ["gpu_launches.py", "--dry", "--json", str(tmp_path / "all.jsonl")])
    launches.main()
    found = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(found) == 2 + len(launches.EQUAL_SUMS)
    assert all(each["ours_us"] > 0 and each["frozen_us"] > 0 for each in found)
    printed = capsys.readouterr().out
    assert len(re.findall("mixed ranks over the mean of equal ones, (?:fp32|bf16)", printed)) == 2
    monkeypatch.setattr(sys, "argv", ["gpu_graph.py", "--dry"])
    assert graph.main() == 0
    assert ", 0 with other bits" in capsys.readouterr().out


def test_jobs_lose_only_those_that_hang_or_fail(tmp_path: Path) -> None:
    from gpu import jobs

    program = tmp_path / "child.py"
    program.write_text(
        "import os, time\n"
        "from gpu.jobs import serve\n"
        "class Worker:\n"
        "    def add(self, a, b): print('adding', flush=True); return {'sum': a + b}\n"
        "    def hang(self): time.sleep(99)\n"
        "    def die(self): os._exit(9)\n"
        "    def fail(self): raise RuntimeError('an illegal memory access')\n"
        "serve(Worker)\n"
    )
    command = ["env", f"PYTHONPATH={ROOT}/bench", sys.executable, str(program)]
    runs = jobs.Jobs(command, 60)
    assert runs.run("add", [1, 2], 30) == {"sum": 3}
    assert "hung" in runs.run("hang", [], 0.2)
    assert runs.run("fail", [], 30) == {"failed": "RuntimeError: an illegal memory access"}
    assert runs.run("die", [], 30) == {"failed": "the child ended with 9. "}
    assert runs.run("add", [2, 2], 30) == {"sum": 4}
    runs.stop()
    assert jobs.Jobs(command, 0).run("add", [1, 2], 30) == {"skipped": "no time left"}


def test_products_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong element is found; what is not right is not timed, and the exit code says so."""
    from gpu import products

    key = [1, 0, 1]
    monkeypatch.setattr(products, "SHAPES", products.SHAPES[:1])
    worker = products.Worker(tmp_path, True, f"wrong {key}")

    class Here:
        def run(self, name: str, arguments: list[Any], seconds: float) -> Any:
            return json.loads(json.dumps(getattr(worker, name)(*arguments)))

        def stop(self) -> None: ...

    found = worker.check(key)
    assert [case["bad"] for case in found["cases"]] == [1] * 4
    assert found["cases"][0]["where"]["rows"] == [7]
    session = products.Session(Here(), watched=False)  # type: ignore[arg-type]
    session.all()
    assert session.failed
    printed = capsys.readouterr().out
    assert re.search("forward, cluster 1 +WRONG", printed)
    assert re.search("dX, masks stored, cluster 2 +right", printed)
    forward, _, backward = printed.rpartition("right?")[2].partition(", dX: vendor")
    assert "ours, alone, cluster 1, group 8" in backward
    assert "ours, alone, cluster 1, group 8" not in forward
