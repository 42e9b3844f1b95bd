"""A stage of a run that dies, hangs, fails or runs out of memory: one line, all end, and resume continues."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from mlora.checkpoint import list_checkpoints
from stage_runs import assert_equal, commands, error_lines, many_kinds, run_stages, save_deep_base
from tiny_run import write_run

NOTICED = 10.0  # seconds
STAGES = 3
AT = """
import mlora.part, pathlib, torch
plain, calls = mlora.part.StagePart.begin, 0
def begin(*arguments):
    global calls
    calls += 1
    plain(*arguments)
    if calls == {call}:
        pathlib.Path({mark!r}).touch()
        {fault}
mlora.part.StagePart.begin = begin
"""
FAULTS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSTOP": "os.kill(os.getpid(), signal.SIGSTOP)",
    "raises": "raise KeyError('boom')",
    "memory": "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB.')",
}
FLIGHT = r"; adapters in flight: (wide|queries|head|deep)(, (wide|queries|head|deep))*"
LINES = {
    "SIGKILL": "{who} was killed or ended" + FLIGHT,
    "SIGSTOP": r"{who} has not answered for [67] s" + FLIGHT,
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


def disturbed(base: Path, folder: Path, stage: int, fault: str, call: int = 22) -> tuple[list[Any], list[str]]:
    """Train until a stage meets its fault: exit codes, and what the stages wrote to standard error."""
    path = write_run(folder, config(base, folder, partition=[1, 1, 2]))
    mark = folder / "mark"
    before = {stage: AT.format(call=call, mark=str(mark), fault=fault)}
    with commands(["train", path], STAGES, before) as running:
        codes, _, errors = running.end(timeout=60)
        assert time.time() - mark.stat().st_mtime < NOTICED
        who = rf"stage {stage} \(\S+, pid {running.processes[stage].pid}\)"
    return codes, [who, *errors]


def resumes(folder: Path, whole: Path) -> None:
    """The run goes on to the end of the one that nothing disturbed."""
    assert list_checkpoints(folder / "run" / "checkpoints")
    assert not list((folder / "run").rglob("*.tmp"))
    codes, outputs, errors = run_stages(["resume", folder / "run"], STAGES)
    assert codes == [0] * STAGES, errors
    assert outputs[0].startswith(f"resuming {folder / 'run'} at iteration ")
    assert_equal(folder / "run", whole)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", range(STAGES))
def test_stage_at_fault_is_told_once(base: Path, whole: Path, tmp_path: Path, stage: int, fault: str) -> None:
    codes, (who, *errors) = disturbed(base, tmp_path, stage, FAULTS[fault])
    killed = fault.startswith("SIG")
    assert codes == [-signal.SIGKILL if killed and rank == stage else 1 for rank in range(STAGES)]
    (line,) = error_lines(errors)
    expected = "error: " + LINES[fault].format(who=who)
    if fault == "memory" and stage == 0:
        expected = r"error: out of memory at iteration \d+; lower per_device_train_batch_size .*"
    assert re.fullmatch(expected, line), line
    assert fault == "raises" or "".join(errors).count("\n") == 1  # an error of ours comes with its traceback
    if fault == "SIGKILL":
        resumes(tmp_path, whole)
