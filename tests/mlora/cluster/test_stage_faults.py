"""A stage of a run that dies, hangs, fails or runs out of memory: one line, all end, and resume continues.

Every kind of fault at every stage is nightly; before each change, every kind once and every stage once.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from mlora.cli.run_status import read_status
from mlora.store.checkpoint import list_checkpoints
from stage_runs import (
    ENVIRONMENT,
    assert_alike,
    assert_equal,
    by_adapter,
    commands,
    error_lines,
    many_kinds,
    run_stages,
    save_deep_base,
)
from tiny_run import write_run

from tests.mlora.stages import is_alive, until

NOTICED = 10.0  # seconds
STAGES = 3
AT = """
import mlora.engine.stage_worker, pathlib, torch
plain, calls = mlora.engine.stage_worker.StageWorker.forward, 0
def forward(*arguments, **named):
    global calls
    calls += 1
    output = plain(*arguments, **named)
    if calls == 22:
        time.sleep({seen})  # the others have seen which adapters are under way
        pathlib.Path({mark!r}).touch()
        {fault}
    return output
mlora.engine.stage_worker.StageWorker.forward = forward
"""
FAULTS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSTOP": "os.kill(os.getpid(), signal.SIGSTOP)",
    "raises": "raise KeyError('boom')",
    "memory": "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB.')",
}
IMPATIENT = """
import functools, mlora.cluster.watchdog, mlora.run.stages
mlora.cluster.watchdog._OWN_ERROR = mlora.run.stages.STAGE_0_FIRST = 0.5
mlora.run.stages.Watch = functools.partial(mlora.cluster.watchdog.Watch, interval=0.2, patience=3.0)
"""
FLIGHT = r"; adapters in flight: (wide|queries|head|deep)(, (wide|queries|head|deep))*"
LINES = {
    "SIGKILL": "{who} was killed or ended" + FLIGHT,
    "SIGSTOP": r"{who} has not answered for {silence} s" + FLIGHT,
    "raises": "{who}: KeyError: 'boom'" + FLIGHT,
    "memory": "{who}: out of memory; lower per_device_train_batch_size or max_length .*`" + FLIGHT,
}


def config(base: Path, folder: Path, **pipeline: Any) -> dict[str, Any]:
    """A run whose adapters all end well."""
    data = many_kinds(base, folder, pipeline={"stages": STAGES, **pipeline})
    data["adapters"] = data["adapters"][:4]
    return data


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_deep_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    data = config(base, folder, partition=[1, 1, 2])
    codes, _, errors = run_stages(["train", write_run(folder, data)], STAGES)
    assert codes == [0] * STAGES, errors
    return folder / "run"


class Disturbed(NamedTuple):
    """A run of which one stage met its fault: exit codes, outputs, and a pattern that names the stage."""

    codes: list[Any]
    outputs: list[str]
    errors: list[str]
    who: str


def disturbed(
    base: Path, folder: Path, stage: int, fault: str, *, impatient: bool = False, told: str = ""
) -> Disturbed:
    """Train until a stage meets its fault; `told` is Python that stage 0 runs first."""
    path = write_run(folder, config(base, folder, partition=[1, 1, 2]))
    mark = folder / "mark"
    before = dict.fromkeys(range(STAGES), IMPATIENT if impatient else "")
    before[0] += told
    before[stage] += AT.format(seen=0.5 if impatient else 1.5, mark=str(mark), fault=FAULTS[fault])
    with commands(["train", path], STAGES, before) as running:
        codes, outputs, errors = running.end(timeout=60)
        assert time.time() - mark.stat().st_mtime < NOTICED
        who = rf"stage {stage} \(\S+, pid {running.processes[stage].pid}\)"
    return Disturbed(codes, outputs, errors, who)


@pytest.fixture(scope="module")
def killed(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Disturbed]:
    """The folder of a run that lost stage 0."""
    folder = tmp_path_factory.mktemp("killed")
    return folder / "run", disturbed(base, folder, 0, "SIGKILL", impatient=True)


def assert_resumes(folder: Path, whole: Path) -> None:
    """The run goes on to the end of the one that nothing disturbed."""
    assert list_checkpoints(folder / "run" / "checkpoints")
    assert not list((folder / "run").rglob("*.tmp"))
    codes, outputs, errors = run_stages(["resume", folder / "run"], STAGES)
    assert codes == [0] * STAGES, errors
    assert outputs[0].startswith(f"resuming {folder / 'run'} at iteration ")
    assert_equal(folder / "run", whole)


def assert_told_once(run: Disturbed, stage: int, fault: str, silence: str = "[67]") -> None:
    killed = fault.startswith("SIG")
    assert run.codes == [-signal.SIGKILL if killed and rank == stage else 1 for rank in range(STAGES)]
    (line,) = error_lines(run.errors)
    expected = "error: " + LINES[fault].format(who=run.who, silence=silence)
    if fault == "memory" and stage == 0:
        expected = r"error: out of memory at iteration \d+; lower per_device_train_batch_size .*"
    assert re.fullmatch(expected, line), line
    # an error of ours comes with its traceback
    assert fault == "raises" or "".join(run.errors).count("\n") == 1


def test_killed_stage_is_told_once_and_the_run_goes_on(
    whole: Path, killed: tuple[Path, Disturbed], tmp_path: Path
) -> None:
    assert_told_once(killed[1], 0, "SIGKILL")
    shutil.copytree(killed[0], tmp_path / "run")
    assert_resumes(tmp_path, whole)


def test_frozen_stage_is_told_once_and_the_terminal_is_put_right(base: Path, tmp_path: Path) -> None:
    """A frozen stage ends stage 0 from a thread of the watch, which no `finally` sees."""
    told = "from mlora.run import reporter\n"
    told += "reporter.PlainLines.close = lambda self: print('put right', flush=True)\n"
    run = disturbed(base, tmp_path, 1, "SIGSTOP", impatient=True, told=told)
    assert_told_once(run, 1, "SIGSTOP", silence="[34]")
    assert "put right" in run.outputs[0]


@pytest.mark.parametrize(("stage", "fault"), [(2, "raises"), (1, "memory")])
def test_stage_that_fails_is_told_once(base: Path, tmp_path: Path, stage: int, fault: str) -> None:
    assert_told_once(disturbed(base, tmp_path, stage, fault, impatient=True), stage, fault)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", range(STAGES))
def test_stage_at_fault_is_told_once(base: Path, whole: Path, tmp_path: Path, stage: int, fault: str) -> None:
    assert_told_once(disturbed(base, tmp_path, stage, fault), stage, fault)
    if fault == "SIGKILL":
        assert_resumes(tmp_path, whole)


IN_A_CALL = """
import mlora.{module}
def {name}(*arguments, **options):
    {fault}
mlora.{module}.{name} = {name}
"""


def fails(arguments: list[Any], before: dict[int, str], size: int = STAGES) -> tuple[list[Any], str]:
    """Exit codes and the one error line of a run that fails within seconds."""
    with commands(arguments, size, before) as running:
        began = time.monotonic()
        codes, _, errors = running.end(timeout=60)
        seconds = time.monotonic() - began
    (line,) = error_lines(errors)
    assert seconds < 30, line
    return codes, line


AT_START = {
    "raises": ("run.stages.stage_of_this_process", "raise KeyError('boom')", "KeyError: 'boom'"),
    "ends": ("run.stages.stage_of_this_process", "os._exit(3)", "was killed or ended"),
    "weights": (
        "engine.stage_group.make_worker",
        "raise ValueError('base_model: none\\nmore')",
        "base_model: none",
    ),
    "memory": ("engine.stage_group.make_worker", "raise MemoryError", "out of memory"),
}
QUICK = {"raises": 0, "ends": 2, "weights": 1, "memory": 1}
AT_STARTS = [
    pytest.param(kind, stage, marks=() if QUICK[kind] == stage else pytest.mark.nightly)
    for kind in AT_START
    for stage in range(STAGES)
]


@pytest.mark.parametrize(("kind", "stage"), AT_STARTS)
def test_stage_that_fails_at_its_start(base: Path, tmp_path: Path, stage: int, kind: str) -> None:
    call, fault, expected = AT_START[kind]
    module, name = call.rsplit(".", 1)
    first = dict.fromkeys(range(STAGES), IMPATIENT if QUICK[kind] == stage else "")
    first[stage] += IN_A_CALL.format(module=module, name=name, fault=fault)
    codes, line = fails(["train", write_run(tmp_path, config(base, tmp_path))], first)
    assert codes == [3 if rank == stage and "_exit" in fault else 1 for rank in range(STAGES)]
    assert expected in line
    assert stage == 0 or line.startswith(f"error: stage {stage} (")
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_full_disk(base: Path, whole: Path, tmp_path: Path) -> None:
    """No file of stage 0 may grow beyond a size that a later checkpoint needs."""
    path = write_run(tmp_path, config(base, tmp_path, partition=[1, 1, 2]))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))"
    codes, line = fails(["train", path], {0: limit})
    assert codes == [1, 1, 1]
    assert re.fullmatch(rf"error: {tmp_path}/run/\S+: cannot be saved: File too large", line), line
    codes, _, errors = run_stages(["resume", tmp_path / "run"], STAGES)
    assert codes == [0] * STAGES, errors
    assert_equal(tmp_path / "run", whole)


def test_error_of_stage_0_with_batches_under_way(base: Path, tmp_path: Path) -> None:
    before = IMPATIENT + "import mlora.run.loop\nmlora.run.loop.TrainingLoop._take = lambda *_: {}['lost']\n"
    codes, line = fails(["train", write_run(tmp_path, config(base, tmp_path))], {0: before})
    assert codes == [1, 1, 1]
    assert re.fullmatch(r"error: stage 0 \(.*\): KeyError: 'lost'" + FLIGHT, line), line


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_interrupted_run_goes_on(base: Path, whole: Path, tmp_path: Path, number: signal.Signals) -> None:
    path = write_run(tmp_path, config(base, tmp_path, partition=[1, 1, 2]))
    with commands(["train", path], STAGES) as running:
        deadline = time.monotonic() + 60
        while "queries" not in by_adapter(tmp_path / "run") and time.monotonic() < deadline:
            time.sleep(0.02)
        running.signal(0, number)
        codes, outputs, errors = running.end()
    assert codes == [128 + number, 0, 0]
    assert outputs[0].endswith(f"interrupted; continue with: mlora resume {tmp_path / 'run'}\n")
    assert errors == [""] * STAGES
    assert_resumes(tmp_path, whole)


@contextmanager
def launched(path: Path, *options: str) -> Iterator["tuple[subprocess.Popen[str], list[int]]"]:
    """`mlora train` with its own launcher, at work on its steps, and the processes of its stages."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mlora", "train", str(path), *options],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids: list[int] = []
    try:
        deadline = time.monotonic() + 60
        while "queries" not in by_adapter(path.parent / "run") and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = [
            int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ]
        yield process, pids
    finally:
        process.kill()
        process.communicate()
        assert until(lambda: not any(is_alive(pid) for pid in pids), 5), "processes are left"


@contextmanager
def starting(path: Path) -> Iterator["tuple[subprocess.Popen[str], list[int]]"]:
    """`mlora train` with its own launcher, whose processes have not met each other."""
    command = [sys.executable, "-m", "mlora", "train", str(path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **pipes)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        assert until(lambda: len(children.read_text().split()) == 2, 60)
        pids = [int(pid) for pid in children.read_text().split()]
        time.sleep(1)
        yield process, pids
        assert not any(is_alive(pid) for pid in pids)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.nightly
def test_stage_killed_before_all_have_met(base: Path, tmp_path: Path) -> None:
    with starting(long_run(base, tmp_path)) as (process, pids):
        began = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < NOTICED
    assert process.returncode == 128 + signal.SIGKILL
    assert errors == f"error: stage 1 (pid {pids[1]}) was ended by SIGKILL\n"


@pytest.mark.nightly
def test_launcher_interrupted_before_all_have_met(base: Path, tmp_path: Path) -> None:
    with starting(long_run(base, tmp_path)) as (process, _):
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < NOTICED
    assert process.returncode == 130
    assert errors in ("", "error: interrupted\n")


def long_run(base: Path, folder: Path) -> Path:
    """A run of two stages that would take minutes, with checkpoints at its beginning."""
    data = config(base, folder, stages=2)
    data["adapters"] = data["adapters"][1:2]
    data["adapters"][0] |= {"max_steps": 20000}
    return write_run(folder, data)


@pytest.mark.nightly
def test_interrupted_launcher(base: Path, tmp_path: Path) -> None:
    with launched(long_run(base, tmp_path)) as (process, pids):
        assert len(pids) == 2
        assert read_status(tmp_path / "run").line == f"running: {tmp_path / 'run'}"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
    assert output.endswith(f"interrupted; continue with: mlora resume {tmp_path / 'run'}\n")


@pytest.mark.nightly
def test_a_killed_stage_leaves_a_run_that_goes_on(base: Path, tmp_path: Path) -> None:
    with launched(long_run(base, tmp_path)) as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode
    fault, way_on = errors.splitlines()
    assert fault.startswith("error: stage 1 (")
    assert way_on == f"continue with: mlora resume {tmp_path / 'run'}"


@pytest.mark.nightly
def test_killed_launcher(base: Path, tmp_path: Path) -> None:
    with launched(long_run(base, tmp_path)) as (process, pids):
        assert len(pids) == 2
        process.kill()
        assert until(lambda: not any(is_alive(pid) for pid in pids), 5)
    assert read_status(tmp_path / "run").line.startswith("not running; `mlora resume ")


def test_resume_of_a_finished_run_ends_at_once(whole: Path) -> None:
    began = time.monotonic()
    codes, _, errors = run_stages(["resume", whole], STAGES)
    assert (codes, errors) == ([0] * STAGES, [""] * STAGES)
    assert time.monotonic() - began < 25, "who waits for another one's goodbye waits for 30 s"


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)]
)
def test_another_number_of_stages_continues(
    whole: Path, killed: tuple[Path, Disturbed], tmp_path: Path, count: int
) -> None:
    shutil.copytree(killed[0], tmp_path / "run")
    file = tmp_path / "run" / "config.yaml"
    written = yaml.safe_load(file.read_text())
    written["pipeline"]["stages"] = count
    file.write_text(yaml.safe_dump(written))
    codes, line = fails(["resume", tmp_path / "run"], {}, 1)
    assert codes == [1]
    assert f"pipeline.partition: must have one number per stage: stages is {count}, got 3 numbers" in line
    del written["pipeline"]["partition"]
    file.write_text(yaml.safe_dump(written))
    codes, _, errors = run_stages(["resume", tmp_path / "run"], count)
    assert codes == [0] * count, errors
    assert_alike(tmp_path / "run", whole)
    assert len(yaml.safe_load(file.read_text())["pipeline"].get("partition", [4])) == count
