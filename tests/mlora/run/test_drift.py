"""A process takes more the longer it trains: that makes tasks wait, and none is refused for it."""

from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from drifting_runs import drift
from limited_runs import TASK, Watching, decisions, die, replace_memory, undisturbed
from mlora.config.config_file import resolve_config
from mlora.engine.engine import Engine
from mlora.engine.measured_samples import MeasuredSamples
from mlora.errors import RunError
from mlora.memory.adapter_memory import AdapterMemory
from mlora.memory.room import MemoryLimit
from mlora.run.run import resume, train
from mlora.run.validation import validate
from mlora.tasks.result import RunResult
from tiny_run import lines, run_data, weights

MIB = 2**20
TOOK = MemoryLimit.took


class Meter:
    """What the process has in use: nothing at first, and `grows` once a micro-batch has passed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        replace_memory(patch)
        self.used, self.grows, self.gives_back, self.jitter = 0, 0, 0, count(0, 0)
        patch.setattr(Engine, "used_memory", lambda _: [self.used + next(self.jitter)])
        patch.setattr(Engine, "release_memory", lambda _: self.release())
        patch.setattr(AdapterMemory, "at_rest", lambda *_: (0,))
        patch.setattr(MemoryLimit, "took", lambda memory, *_: self.took(memory))

    def release(self) -> None:
        self.used -= min(self.used, self.gives_back)

    def took(self, memory: MemoryLimit) -> None:
        self.used = self.grows
        TOOK(memory, [], [0.0], 0, [self.used])


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    return Meter(monkeypatch)


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    """Two tasks, of which each fits alone, with the least reserve and 20 MiB to spare."""
    return run_data(tiny_base, tmp_path) | {"scheduler": {"memory_limit": TASK + 52 * MIB}}


@pytest.mark.parametrize(("grows", "gives_back"), [(40, 0), (90, 50)])
def test_a_task_runs_after_its_twin_though_the_process_has_grown(
    data: dict[str, Any], tmp_path: Path, meter: Meter, grows: int, gives_back: int
) -> None:
    meter.grows, meter.gives_back = grows * MIB, gives_back * MIB
    result = train(resolve_config(data, folder=tmp_path), reporter=(watching := Watching()))
    assert {name: adapter.state for name, adapter in result.adapters.items()} == {
        "first": "finished",
        "second": "finished",
    }
    first = list(dict.fromkeys(name for name, _ in watching.steps))
    assert first == ["first", "second"]
    assert [name for name, _ in watching.steps] == sorted(name for name, _ in watching.steps)
    assert result.exit_code == 0


@pytest.mark.parametrize(("spare", "warm"), [(-1, 0), (1, 0), (-1, 90), (1, 90)])
def test_validate_and_train_agree_on_who_never_fits(
    data: dict[str, Any], tmp_path: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch, spare: int, warm: int
) -> None:
    """With the least reserve, 32 MiB. What libraries take for a first micro-batch is part of the base; of
    validate's own process only what it had before adapters counts."""
    data["scheduler"]["memory_limit"] = TASK + (32 + spare + warm) * MIB
    config = resolve_config(data, folder=tmp_path)
    adapters: list[str] = []
    create = Engine.create_adapter

    def note(engine: Engine, name: str, *args: Any, **more: Any) -> None:
        adapters.append(name)
        create(engine, name, *args, **more)

    def warm_up(_: MeasuredSamples) -> None:
        meter.used = meter.grows = warm * MIB

    monkeypatch.setattr(Engine, "create_adapter", note)
    monkeypatch.setattr(MeasuredSamples, "warm_up", warm_up)
    for module in ("prepare", "validation"):
        monkeypatch.setattr(f"mlora.run.{module}.used_memory", lambda _: meter.used + len(adapters) * TASK)
    plan = validate(config).plan
    assert plan is not None
    assert adapters == ["first", "second"]
    never = {"first", "second"} if spare < 0 else set()
    assert {task.name for task in plan.never} == never
    watching = Watching()
    meter.used = 0
    if never:
        with pytest.raises(RunError, match="every adapter was refused"):
            train(config, reporter=watching)
    else:
        assert train(config, reporter=watching).exit_code == 0
    assert {line.split(":")[0] for line in watching.lines if "refused" in line} == never


def test_what_a_process_has_no_room_for_any_more_goes_on_in_a_new_one(
    data: dict[str, Any], tmp_path: Path, meter: Meter
) -> None:
    meter.grows = 60 * MIB
    result = train(resolve_config(data, folder=tmp_path), reporter=(watching := Watching()))
    assert {name: adapter.state for name, adapter in result.adapters.items()} == {
        "first": "finished",
        "second": "running",
    }
    run = tmp_path / "run"
    assert (result.status, result.signal, result.exit_code) == ("interrupted", None, 1)
    (told,) = [line for line in watching.lines if "not enough memory in this process" in line]
    assert told.startswith("second: not enough memory in this process, which has grown; go on in a new one: ")
    assert told.endswith(f"mlora resume {run}")
    meter.used = 0
    again = resume(run)
    assert again.exit_code == 0
    assert again.adapters["second"].state == "finished"


def states(result: RunResult) -> dict[str, str]:
    return {name: adapter.state for name, adapter in result.adapters.items()}


def left_over(data: dict[str, Any], folder: Path, meter: Meter) -> Path:
    """A run whose second task waits for a new process."""
    meter.grows = 60 * MIB
    config = resolve_config(data, folder=folder)
    assert states(train(config)) == {"first": "finished", "second": "running"}
    return folder / "run"


def test_a_new_process_that_is_larger_leaves_a_task_to_the_next(
    data: dict[str, Any], tmp_path: Path, meter: Meter
) -> None:
    run = left_over(data, tmp_path, meter)
    for used in (21, 21, 60):
        meter.used = used * MIB
        result = resume(run, reporter=(watching := Watching()))
        assert (result.status, states(result)["second"]) == ("interrupted", "running")
        (told,) = [line for line in watching.lines if "not enough memory in this process" in line]
        assert told.startswith(
            f"second: not enough memory in this process, which uses {used} MiB before it trains; go on in "
            f"one that uses {used - 20} MiB less, or raise scheduler.memory_limit to "
            f"{TASK // MIB + 32 + used + 1} MiB"
        )
        assert told.endswith(f": mlora resume {run}")
    meter.used = 0
    assert resume(run).exit_code == 0


def test_a_limit_that_was_named_is_enough(data: dict[str, Any], tmp_path: Path, meter: Meter) -> None:
    run = left_over(data, tmp_path, meter)
    meter.used = 21 * MIB
    resume(run, reporter=(watching := Watching()))
    (told,) = [line for line in watching.lines if "not enough memory in this process" in line]
    change_limit(run, int(told.partition("memory_limit to ")[2].split()[0]))
    assert states(resume(run))["second"] == "finished"


def test_a_run_in_a_process_that_has_grown_before_refuses_nobody(
    data: dict[str, Any], tmp_path: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: what earlier runs have left counts as growth."""
    monkeypatch.setattr("mlora.run.prepare.left_by_runs", lambda _: meter.used)
    meter.used = 60 * MIB
    result = train(resolve_config(data, folder=tmp_path), reporter=(watching := Watching()))
    assert (result.status, set(states(result).values())) == ("interrupted", {"running"})
    (told,) = [line for line in watching.lines if "not enough memory in this process" in line]
    assert told.startswith("first, second: not enough memory in this process, which uses 60 MiB before it")
    meter.used = 0
    assert resume(tmp_path / "run").exit_code == 0


def test_a_measurement_that_is_never_the_same_decides_once(
    data: dict[str, Any], tmp_path: Path, meter: Meter
) -> None:
    run = left_over(data, tmp_path, meter)
    meter.used, meter.jitter = 21 * MIB, count(0, 4096)
    before = len(decisions(run))
    assert states(resume(run))["second"] == "running"
    assert len(decisions(run)) <= before + 1


def test_a_refusal_for_good_names_the_figures_that_it_goes_by(
    data: dict[str, Any], tmp_path: Path, meter: Meter
) -> None:
    """Those of the smallest process, whatever the present one takes; the limit that they name is enough."""
    run = left_over(data, tmp_path, meter)
    change_limit(run, TASK // MIB + 31)
    meter.used = 21 * MIB
    refused = resume(run).adapters["second"]
    assert refused.state == "refused"
    assert "the base model and libraries take 0 bytes, and 32 MiB are kept in reserve" in refused.message
    assert refused.message.endswith(f"raise the limit to {TASK // MIB + 33} MiB")


def change_limit(run: Path, limit: int) -> None:
    """Change a run's limit to so many MiB."""
    path = run / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["scheduler"]["memory_limit"] = f"{limit}MiB"
    path.write_text(yaml.safe_dump(values))


def test_what_was_measured_anew_is_in_the_journal(
    data: dict[str, Any], tmp_path: Path, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on after a kill, in a process of another size, does the same."""
    meter.grows = 40 * MIB
    data["defaults"]["save_steps"] = None
    run = tmp_path / "run"
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(data, folder=tmp_path), reporter=Watching({("second", 1): die}))
    assert [names for names, _ in groupby(decisions(run).values())] == [["first"], ["second"]]
    meter.used, meter.grows = 0, 49 * MIB
    assert resume(run).exit_code == 0
    monkeypatch.setattr(Engine, "used_memory", lambda _: [10**12])
    again = undisturbed(run, tmp_path / "again")
    assert lines(again) == lines(run)
    assert weights(again) == weights(run)


def test_twenty_random_runs_train_all_that_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [drift(seed, monkeypatch) for seed in range(20)]
    for seed, outcome in enumerate(outcomes):
        assert set(outcome.states.values()) == {"finished"}, seed
        assert not [line for line in outcome.lines if "refused" in line], seed
        assert max(outcome.beginnings) <= 1.0, seed
    assert sum(outcome.tried for outcome in outcomes) >= 20  # else nobody was in doubt
    assert max(outcome.processes for outcome in outcomes) > 1
