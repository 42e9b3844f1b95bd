"""Each signal that ends a run, in each phase: a checkpoint at once, and a resume bit for bit."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from mlora.cluster.signals import OTHERS, URGENT, Caught
from mlora.config.adapter_config import AdapterConfig
from mlora.config.config_file import resolve_config
from mlora.engine.batcher import Batcher
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.model import generation
from mlora.run.run import resume, train
from mlora.store import checkpoint_writer
from mlora.tasks.task import Task, TaskBuilder
from tiny_run import lines, run_data, weights, write_jsonl, write_run

from tests.mlora.limited_runs import Watching, ask, submission
from tests.mlora.stage_runs import by_adapter, commands

SIGNALS = [*URGENT, *OTHERS]
PHASES = {
    "first evaluation": ("mlora.run.evaluation", "_parts", 1),
    "training": ("mlora.run.loop:TrainingLoop", "_step", 5),
    "evaluation": ("mlora.run.evaluation", "_parts", 8),
    "answers": ("mlora.run.evaluation", "_rows_that_fit", 2),
    "checkpoint": ("mlora.store.checkpoint_writer", "save_checkpoint", 2),
    "end": ("mlora.run.loop", "plot_losses", 1),
}
"""Where the signal comes in each phase: what holds a function, its name, and its call of what number."""
START = {"start": ("mlora.run.run", "prepare", 1)}
SENDS = """
from pkgutil import resolve_name
owner, left = resolve_name({0!r}), {2}
plain = getattr(owner, {1!r})
def call(*arguments, **options):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), {3})
    return plain(*arguments, **options)
setattr(owner, {1!r}, call)
"""
PATIENCE = 240.0  # seconds; a busy machine takes a minute to start two processes


def data_of(base: Path, folder: Path, stages: int) -> dict[str, Any]:
    """Two adapters, one of them with answers at each evaluation and its best weights kept."""
    data = run_data(base, folder)
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(3) for b in range(2)]
    write_jsonl(folder / "sums.jsonl", sums)
    data["datasets"].append({"name": "sums", "path": "sums.jsonl", "format": "prompt_completion"})
    data["adapters"][0] |= {"gradient_accumulation_steps": 2, "max_steps": 4, "eval_steps": 2}
    data["adapters"][1] |= {
        "dataset": "sums",
        "eval_dataset": "sums",
        "eval_exact_match": True,
        "eval_steps": 2,
        "max_steps": 6,
        "per_device_eval_batch_size": 3,
        "metric_for_best_model": "eval_loss",
        "load_best_model_at_end": True,
    }
    return data | {"pipeline": {"stages": stages}}


def run_of(data: dict[str, Any], folder: Path) -> Any:
    """Train in a folder; the data lies beside the undisturbed run."""
    return train(resolve_config(data | {"output_dir": str(folder)}, folder=Path(data["output_dir"]).parent))


@pytest.fixture(scope="module", params=[1, 2])
def whole(request: pytest.FixtureRequest, tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The number of stages, the config's data, and the folder of a run that no signal met."""
    folder = tmp_path_factory.mktemp(f"whole{request.param}")
    data = data_of(tiny_base, folder, request.param)
    assert run_of(data, folder / "whole").exit_code == 0
    return request.param, data, folder


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the micro-batches, and the tokens of answers, that were computed."""
    count = [0]

    def counted(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    counted(Batcher, "_enter")
    counted(Engine, "next_tokens")
    counted(generation._Checking, "__call__")
    return count


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch, entered: list[int]) -> Iterator[Callable[[str, int], list[int]]]:
    """Has a signal come in a phase; returns a list that then gets `entered` of that moment."""

    def plan(phase: str, number: int) -> list[int]:
        where, name, left = PHASES[phase]
        owner, at = resolve_name(where), list[int]()
        plain = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                at.append(entered[0])
                os.kill(os.getpid(), number)
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, call)
        return at

    before = [signal.getsignal(number) for number in SIGNALS]
    yield plan
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.pairwise
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_a_run_at_once_and_nothing_is_lost(
    whole: Any,
    tmp_path: Path,
    send: Callable[[str, int], list[int]],
    entered: list[int],
    phase: str,
    number: signal.Signals,
) -> None:
    stages, data, folder = whole
    at = send(phase, number)
    result = run_of(data, tmp_path / "run")
    assert at, "the phase never came"
    # the thread that writes goes on beside the next batch; a token is checked after it was computed
    assert entered[0] - at[0] <= {"checkpoint": 4, "answers": 1}.get(phase, 0)
    if phase == "end":
        assert (result.status, result.exit_code) == ("finished", 0)
    else:
        assert (result.status, result.exit_code) == ("interrupted", 128 + number)
        assert list((tmp_path / "run" / "checkpoints").iterdir())
        assert resume(tmp_path / "run").exit_code == 0
    assert by_adapter(tmp_path / "run") == by_adapter(folder / "whole")
    assert stages > 1 or lines(tmp_path / "run") == lines(folder / "whole")
    assert weights(tmp_path / "run") == weights(folder / "whole")
    samples = [
        sorted((run / "samples.jsonl").read_text().splitlines())
        for run in (tmp_path / "run", folder / "whole")
    ]
    assert samples[0] == samples[1]


def test_an_evaluation_that_is_interrupted_twice(
    whole: Any, tmp_path: Path, send: Callable[[str, int], list[int]]
) -> None:
    _, data, folder = whole
    send("evaluation", signal.SIGHUP)
    assert run_of(data, tmp_path / "run").status == "interrupted"
    send("first evaluation", signal.SIGTERM)
    assert resume(tmp_path / "run").exit_code == 128 + signal.SIGTERM
    assert resume(tmp_path / "run").exit_code == 0
    assert by_adapter(tmp_path / "run") == by_adapter(folder / "whole")
    assert weights(tmp_path / "run") == weights(folder / "whole")


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("whole", [1], indirect=True)
def test_ignored_signals_and_those_of_the_program_are_left_alone(
    whole: Any, tmp_path: Path, send: Callable[[str, int], list[int]], number: signal.Signals
) -> None:
    """As under nohup; a handler of the calling program is called as ever."""
    _, data, _ = whole
    met: list[int] = []
    handler: Any = signal.SIG_IGN if number == signal.SIGHUP else lambda number, frame: met.append(number)
    before = signal.signal(number, handler)
    try:
        send("training", number)
        assert run_of(data, tmp_path / "run").exit_code == 0
    finally:
        signal.signal(number, before)
    assert met == ([] if number == signal.SIGHUP else [number])


@pytest.mark.parametrize("whole", [1], indirect=True)
def test_a_second_warning_does_not_hurry_the_checkpoint(
    whole: Any, tmp_path: Path, send: Callable[[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed terminal is told twice, and a scheduler's SIGUSR1 is followed by SIGTERM."""
    _, data, folder = whole
    plain = checkpoint_writer.save_checkpoint

    def save(*arguments: Any) -> None:
        if send_again:
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
        plain(*arguments)

    send_again = send("training", signal.SIGUSR1)
    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", save)
    assert run_of(data, tmp_path / "run").exit_code == 128 + signal.SIGUSR1
    monkeypatch.setattr(checkpoint_writer, "save_checkpoint", plain)
    assert resume(tmp_path / "run").exit_code == 0
    assert weights(tmp_path / "run") == weights(folder / "whole")


@pytest.mark.parametrize("whole", [1], indirect=True)
def test_a_task_that_a_signal_keeps_from_being_read_waits(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal reaches all processes of a job, and so ends those that tokenise a submitted task's data."""
    _, data, folder = whole
    run, plain = tmp_path / "run", TaskBuilder.build
    late = submission(data, folder, "late")

    def build(self: TaskBuilder, adapter: AdapterConfig, *rest: Any, **more: Any) -> Task:
        if adapter.name == "late":
            os.kill(os.getpid(), signal.SIGTERM)
            raise RunError("a process that tokenises has ended")
        return plain(self, adapter, *rest, **more)

    monkeypatch.setattr(TaskBuilder, "build", build)
    told = Watching({("first", 1): lambda: ask(run, "submit", "late", late)})
    config = resolve_config(data | {"output_dir": str(run)}, folder=folder)
    assert train(config, reporter=told).exit_code == 128 + signal.SIGTERM
    monkeypatch.setattr(TaskBuilder, "build", plain)
    assert {name: one.state for name, one in resume(run).adapters.items()} == dict.fromkeys(
        [*(adapter["name"] for adapter in data["adapters"]), "late"], "finished"
    )


def test_the_same_signal_within_a_second_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    caught, times = Caught(), iter([0.0, 0.2, 0.3, 1.5])
    monkeypatch.setattr("mlora.cluster.signals.time.monotonic", lambda: next(times))
    coming = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM]
    assert [caught.note(number) for number in coming] == [False, False, False, True]
    assert caught == [signal.SIGTERM, signal.SIGHUP, signal.SIGTERM]


def cases() -> Iterator[Any]:
    """Each signal in each phase; two of them before each change, the rest at night."""
    for phase in START | PHASES:
        for number in SIGNALS:
            usual = (phase, number) in (("start", signal.SIGUSR1), ("evaluation", signal.SIGHUP))
            yield pytest.param(phase, number, marks=() if usual else pytest.mark.nightly)


@pytest.mark.parametrize(("phase", "number"), list(cases()))
def test_a_signal_ends_the_command(whole: Any, tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """`mlora train` in processes of its own; stage 0 gets the signal, as the launcher passes it on."""
    stages, data, folder = whole
    where = data | {"output_dir": str(tmp_path / "run")}
    for dataset in where["datasets"]:
        dataset["path"] = str(folder / Path(dataset["path"]).name)
    path = write_run(tmp_path, where)
    before = SENDS.format(*(START | PHASES)[phase], int(number))
    with commands(["train", path], stages, {0: before}) as running:
        codes, outputs, errors = running.end(PATIENCE)
    if phase == "start":
        dies = -number if stages == 1 and number != signal.SIGINT else 128 + number
        assert codes == [dies, 1][:stages]
        assert errors[0] == ("error: interrupted\n" if number == signal.SIGINT else "")
        assert not (tmp_path / "run" / "config.yaml").exists()
        return
    assert codes == [0 if phase == "end" else 128 + number, 0][:stages], errors
    assert errors == [""] * stages
    if phase != "end":
        assert outputs[0].endswith(f"interrupted; continue with: mlora resume {tmp_path / 'run'}\n")
        assert resume(tmp_path / "run").exit_code == 0
    assert by_adapter(tmp_path / "run") == by_adapter(folder / "whole")
    assert weights(tmp_path / "run") == weights(folder / "whole")
