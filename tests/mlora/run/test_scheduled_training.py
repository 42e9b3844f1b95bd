"""Training under a limit on memory: who comes first, who gives way, and what comes of all of them."""

import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from limited_runs import (
    MIB,
    Watching,
    ask,
    decisions,
    die,
    five_tasks,
    interrupt,
    limit_for,
    replace_memory,
    submission,
    undisturbed,
)
from mlora.config.config_file import resolve_config
from mlora.engine.adapter_state import BatchResult
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.memory.estimate import MemoryEstimate
from mlora.memory.room import MemoryLimit
from mlora.run.evaluation import Fits, evaluate_losses
from mlora.run.run import resume, train
from mlora.store.run_folder import RunFolder
from mlora.tasks.result import RunResult
from mlora.tasks.task import Task
from stage_runs import assert_alike, by_adapter, commands, save_deep_base, tensors
from tiny_run import lines, weights, write_jsonl, write_run

from tests.tolerances import STEADY_EPSILON, assert_same_up_to_rounding

Actions = dict[Any, Callable[[], object]]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_memory(monkeypatch)


@pytest.fixture
def data(tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    return five_tasks(tiny_base, tmp_path)


def run_to_end(data: dict[str, Any], folder: Path, name: str, actions: Actions | None = None) -> Watching:
    """Train, and go on after each interruption and death, until all have ended."""
    watching = Watching(actions)
    config = resolve_config(data | {"output_dir": name}, folder=folder)
    _part(lambda: train(config, reporter=watching))
    again = Watching({when: what for when, what in (actions or {}).items() if isinstance(when, tuple)})
    while _part(lambda: resume(folder / name, reporter=again)).status == "interrupted":
        pass
    return watching


def _part(work: Callable[[], RunResult]) -> RunResult:
    try:
        return work()
    except ConnectionAbortedError:
        return RunResult("interrupted", Path(), 0.0, {}, signal.SIGKILL)


def alone(data: dict[str, Any], folder: Path, adapter: dict[str, Any]) -> Path:
    """Train an adapter by itself."""
    run = folder / f"alone-{adapter['name']}"
    own = data | {"adapters": [adapter], "scheduler": {}, "output_dir": str(run)}
    train(resolve_config(own, folder=folder))
    return run


def assert_as_alone(run: Path, data: dict[str, Any], folder: Path, adapters: list[dict[str, Any]]) -> None:
    """Each adapter's metrics have neither gaps nor repeats, and are those of a run of its own."""
    for adapter in adapters:
        own, name = alone(data, folder, adapter), adapter["name"]
        found, wanted = by_adapter(run)[name], by_adapter(own)[name]
        assert len(found) == len(wanted)
        for record, other in zip(found, wanted, strict=True):
            assert record == pytest.approx(other, rel=1e-5), name
        trained, wanted_weights = tensors(run)[name], tensors(own)[name]
        assert trained.keys() == wanted_weights.keys()
        for key, weight in wanted_weights.items():
            assert_same_up_to_rounding(trained[key], weight, f"{name}: {key}")


def urgent(data: dict[str, Any], folder: Path, run: str, **fields: Any) -> Callable[[], None]:
    """Submit a task that goes before all others."""
    content = submission(data, folder, "urgent", **{"priority": 9, **fields})
    return lambda: ask(folder / run, "submit", "urgent", content)


def test_the_shortest_come_first(data: dict[str, Any], tmp_path: Path) -> None:
    for adapter in data["adapters"]:
        adapter["priority"] = 0
    data["scheduler"]["policy"] = "shortest_first"
    watching = run_to_end(data, tmp_path, "run")
    first = list(dict.fromkeys(name for name, _ in watching.steps))
    assert first[-1] == "high"  # of sixteen samples a step


def test_a_task_of_high_priority_takes_the_place_of_a_lower_one(data: dict[str, Any], tmp_path: Path) -> None:
    """Higher priorities come first, and then who came first."""
    run = tmp_path / "run"
    watching = run_to_end(data, tmp_path, "run", {("high", 1): urgent(data, tmp_path, "run")})
    assert watching.waiting == [
        ["second", "third", "low"],  # as they came
        ["first", "second", "third", "low"],
        ["third", "low"],
        ["low"],
        [],
    ]
    assert list(decisions(run).values()) == [
        ["high", "first"],
        ["urgent", "high"],
        ["first", "second"],
        ["first", "third"],
        ["third", "low"],
        ["low"],
        [],
    ]
    config = submission(data, tmp_path, "urgent", priority=9)["adapter"]
    assert_as_alone(run, data, tmp_path, [*data["adapters"], config])
    assert_same(undisturbed(run, tmp_path / "again"), run)
    assert not (run / "states").exists()


def assert_same(run: Path, other: Path) -> None:
    assert lines(run) == lines(other)
    assert weights(run) == weights(other)


@pytest.mark.parametrize("moments", ["decided, away", pytest.param("asked, back", marks=pytest.mark.nightly)])
def test_it_ends_alike_whenever_it_is_cut_off(data: dict[str, Any], tmp_path: Path, moments: str) -> None:
    """Before a request is taken, right after a decision, while a task is set aside, and when it is back."""
    actions = {("high", 1): urgent(data, tmp_path, "whole")}
    steps = run_to_end(data, tmp_path, "whole", actions).steps
    asked, away, back = (steps.index(step) + 1 for step in (("high", 1), ("urgent", 2), ("first", 2)))
    cuts = {
        "asked": (asked, die),
        "decided": (asked + 1, interrupt),
        "away": (away, die),
        "back": (back, interrupt),
    }
    for after, what in map(cuts.__getitem__, moments.split(", ")):
        name = f"run{after}-{what.__name__}"
        run_to_end(data, tmp_path, name, {("high", 1): urgent(data, tmp_path, name), after: what})
        run = tmp_path / name
        if what is die and after == asked:  # the request is taken where the run goes on
            assert_same(undisturbed(run, tmp_path / "again"), run)
        else:
            assert decisions(run) == decisions(tmp_path / "whole"), name
            assert_same(run, tmp_path / "whole")


@pytest.mark.nightly
def test_it_ends_alike_when_it_dies_again_and_again(data: dict[str, Any], tmp_path: Path) -> None:
    data["defaults"]["save_steps"] = 1
    run_to_end(data, tmp_path, "whole", {("high", 1): urgent(data, tmp_path, "whole")})
    config = resolve_config(data | {"output_dir": "run"}, folder=tmp_path)
    run = tmp_path / "run"
    submit = urgent(data, tmp_path, "run")
    _part(lambda: train(config, reporter=Watching({("high", 1): submit, 5: die})))
    parts = 1
    while _part(lambda: resume(run, reporter=Watching({("high", 1): submit, 5: die}))).status != "finished":
        parts += 1
        assert parts < 40
    assert parts > 3
    assert_same(run, tmp_path / "whole")


def test_a_request_that_came_before_a_kill_is_taken_after_what_was_decided_is_done_again(
    data: dict[str, Any], tmp_path: Path
) -> None:
    data["defaults"]["save_steps"] = None
    data["adapters"] = data["adapters"][:2]
    data["scheduler"]["memory_limit"] = limit_for(1)
    run = tmp_path / "run"

    def ask_and_die() -> None:
        urgent(data, tmp_path, "run")()
        die()

    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(data, folder=tmp_path), reporter=Watching({("second", 1): ask_and_die}))
    assert len(decisions(run)) == 2
    watching = Watching()
    assert resume(run, reporter=watching).exit_code == 0
    steps = [name for name, _ in watching.steps]
    assert "urgent" in steps
    assert steps.index("urgent") < len(steps) - 1 - steps[::-1].index("second")


def test_paused_cancelled_and_let_go_on_under_a_limit(data: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    actions: Actions = {
        ("high", 1): lambda: ask(run, "pause", "first"),
        ("high", 2): lambda: ask(run, "cancel", "low"),
        ("second", 4): lambda: ask(run, "unpause", "first"),
    }
    run_to_end(data, tmp_path, "run", actions)
    admitted = list(decisions(run).values())
    assert admitted[:2] == [["high", "first"], ["high", "second"]]
    assert_as_alone(run, data, tmp_path, data["adapters"][:1])  # who was paused in an accumulation
    assert "low" not in by_adapter(run)
    assert_same(undisturbed(run, tmp_path / "again"), run)
    assert not (run / "states").exists()


def test_stopped_with_their_weights_under_a_limit(data: dict[str, Any], tmp_path: Path) -> None:
    """One on the engine, one that was set aside; the journal repeats both."""
    run = tmp_path / "run"
    actions: Actions = {
        ("second", 2): lambda: ask(run, "pause", "second"),
        ("third", 2): lambda: ask(run, "stop", "third"),
        ("low", 1): lambda: ask(run, "stop", "second"),
    }
    run_to_end(data, tmp_path, "run", actions)
    summary = RunFolder(run).read_summary()
    assert summary is not None
    for name in ("second", "third"):
        entry = summary["adapters"][name]
        assert (entry["state"], entry["message"]) == (
            "finished",
            f"stopped on request at step {entry['step']}",
        )
        assert 0 < entry["step"] == entry["saved_step"] < entry["max_steps"]
    assert weights(run).keys() == summary["adapters"].keys()
    assert_same(undisturbed(run, tmp_path / "again"), run)
    assert not (run / "states").exists()


def test_the_run_stays_resumable_after_its_limit_has_changed(data: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    submit = urgent(data, tmp_path, "run", max_steps=9)
    train(
        resolve_config(data, folder=tmp_path),
        reporter=Watching({("high", 1): submit, ("urgent", 1): interrupt}),
    )
    path = run / "config.yaml"
    before = path.read_text()
    for limit, admitted in ((limit_for(1), 1), ("null", 6), (limit_for(3), 3)):
        path.write_text(before.replace(f"memory_limit: {limit_for(2)}", f"memory_limit: {limit}"))
        done = resume(run, reporter=Watching({1: interrupt}))
        assert done.status == "interrupted"
        assert len(list(decisions(run).values())[-1]) == admitted
    assert resume(run).exit_code == 0
    config = submission(data, tmp_path, "urgent", priority=9, max_steps=9)["adapter"]
    assert_as_alone(run, data, tmp_path, [data["adapters"][0], config])


def test_who_waits_is_told_after_a_resume(data: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(data, folder=tmp_path), reporter=Watching({("first", 1): interrupt}))
    watching = Watching({1: interrupt})
    resume(tmp_path / "run", reporter=watching)
    assert watching.waiting[0] == ["second", "third", "low"]


def test_who_has_begun_goes_on_below_a_lower_limit(data: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = train(resolve_config(data, folder=tmp_path), reporter=Watching({("first", 1): interrupt}))
    begun = {name for name, adapter in first.adapters.items() if adapter.step}
    assert len(begun) == 2
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(f"memory_limit: {limit_for(2)}", "memory_limit: 1000"))
    again = resume(run, reporter=(watching := Watching()))
    assert {name for name, adapter in again.adapters.items() if adapter.state == "finished"} >= begun
    warned = [line for line in watching.lines if "goes on beyond scheduler.memory_limit: needs" in line]
    assert {line.split(":")[0] for line in warned} >= begun
    assert len(warned) == len(set(warned))


def test_a_task_that_never_fits_is_refused_and_the_others_go_on(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "even.jsonl", [{"input_ids": [1 + n] * 20} for n in range(40)])
    data["datasets"].append({"name": "even", "path": "even.jsonl", "format": "tokens"})
    data["adapters"][4] |= {"dataset": "even", "per_device_train_batch_size": 40}
    del data["adapters"][4]["eval_dataset"]
    data["scheduler"]["memory_limit"] = limit_for(1)
    # two mebibytes for each of its sequences
    watching = Watching()
    config = resolve_config(data, folder=tmp_path)
    for name in ("activations", "by_samples"):
        monkeypatch.setattr(
            MemoryEstimate,
            name,
            lambda self, lengths, among: [sum(map(sum, lengths.values())) * MIB / 10],
        )
    result = train(config, reporter=watching)
    told = [line for line in watching.lines if "refused" in line]
    assert len(told) == 1
    assert told[0].startswith(
        "high: refused: needs 180 MiB for its largest micro-batch of 40 sequences with 800"
    )
    assert told[0].endswith(
        "tokens; of scheduler.memory_limit 206 MiB, the base model and libraries take 0 bytes, and 32 MiB "
        "are kept in reserve; lower per_device_train_batch_size to 37, or raise the limit to 212 MiB"
    )
    assert result.exit_code == 1
    states = {name: adapter.state for name, adapter in result.adapters.items()}
    assert states.pop("high") == "refused"
    assert set(states.values()) == {"finished"}


def test_a_task_in_doubt_waits_until_less_is_kept_in_reserve(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 206 MiB, of which 96 are kept in reserve at first, 132 do not fit; with 32 they do."""
    data["scheduler"]["memory_limit"] = limit_for(1)
    data["adapters"][4]["per_device_train_batch_size"] = 4
    del data["adapters"][4]["eval_dataset"]
    monkeypatch.setattr(
        "mlora.memory.estimate.MemoryEstimate.activations",
        lambda self, lengths, among: [32 * MIB if len(next(iter(lengths.values()))) == 4 else MIB],
    )
    passed: list[int] = []

    def took(self: MemoryLimit, *_: Any) -> None:
        passed.append(1)
        if len(passed) == 5:
            self.reserved, self.estimate.stale = 32 * MIB, True

    monkeypatch.setattr(MemoryLimit, "took", took)
    result = train(resolve_config(data, folder=tmp_path), reporter=(watching := Watching()))
    assert {adapter.state for adapter in result.adapters.values()} == {"finished"}
    assert watching.steps[0][0] == "first"  # though it has the highest priority
    assert len(passed) > 5


def test_a_limit_below_the_base_model_refuses_all(data: dict[str, Any], tmp_path: Path) -> None:
    data["scheduler"]["memory_limit"] = 1000
    watching = Watching()
    with pytest.raises(RunError, match=r"^every adapter was refused; nothing to train$"):
        train(resolve_config(data, folder=tmp_path), reporter=watching)
    first, *refused = watching.lines
    assert first == "scheduler.memory_limit: looking at what adapters need"
    assert len(refused) == 5
    assert all("nothing is left for adapters: of scheduler.memory_limit" in line for line in refused)


def test_who_was_taken_is_taken_again_whatever_the_base_takes_now(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill, another process may find more in use."""
    run_to_end(data, tmp_path, "whole", {("high", 1): urgent(data, tmp_path, "whole")})
    data["defaults"]["save_steps"] = None
    submit = urgent(data, tmp_path, "run")
    with pytest.raises(ConnectionAbortedError):
        train(
            resolve_config(data, folder=tmp_path),
            reporter=Watching({("high", 1): submit, ("urgent", 2): die}),
        )
    monkeypatch.setattr(Engine, "used_memory", lambda self: [10**12])
    assert resume(tmp_path / "run").exit_code == 0
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_an_admitted_task_that_cannot_begin_makes_room(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first evaluation is no number, and it is the only one that is admitted."""
    data["scheduler"]["memory_limit"] = limit_for(1)

    def losses(engine: Engine, tasks: list[Task], fits: Fits, *more: Any) -> dict[str, BatchResult]:
        found = evaluate_losses(engine, tasks, fits, *more)
        return {
            name: replace(one, loss_sum=math.nan) if name == "high" else one for name, one in found.items()
        }

    monkeypatch.setattr("mlora.run.loop.evaluate_losses", losses)
    result = train(resolve_config(data, folder=tmp_path))
    states = {name: adapter.state for name, adapter in result.adapters.items()}
    assert states == dict.fromkeys(("first", "second", "third", "low"), "finished") | {"high": "stopped"}


def test_a_micro_batch_without_trained_tokens_comes_first(data: dict[str, Any], tmp_path: Path) -> None:
    data["adapters"] = [
        data["adapters"][1] | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    ]
    samples = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}, {"input_ids": [1, 2, 3]}]
    write_jsonl(tmp_path / "two.jsonl", samples)
    assert train(resolve_config(data, folder=tmp_path)).exit_code == 0


@pytest.fixture
def spread(tmp_path: Path) -> dict[str, Any]:
    """A config for two stages over processes."""
    return on_a_deep_base(tmp_path, pipeline={"stages": 2, "partition": [2, 2]})


def on_a_deep_base(folder: Path, **changes: Any) -> dict[str, Any]:
    """Five tasks; the gradients of this base are larger, and the epsilon that steadies Adam with them."""
    base = folder / "base"
    data = five_tasks(base if base.exists() else save_deep_base(base), folder, **changes)
    data["defaults"]["adam_epsilon"] = 100 * STEADY_EPSILON
    return data


PATCH = """
import pytest
from tests.mlora.limited_runs import replace_memory
replace_memory(pytest.MonkeyPatch())
"""


@pytest.mark.parametrize("begun", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_stages_under_a_limit(spread: dict[str, Any], tmp_path: Path, begun: bool) -> None:
    """From the beginning, and from where a run of one stage was interrupted."""
    one, run = on_a_deep_base(tmp_path), tmp_path / "run"
    run_to_end(one, tmp_path, "whole")
    words = ["train", write_run(tmp_path, spread)]
    if begun:
        train(resolve_config(one, folder=tmp_path), reporter=Watching({("first", 2): interrupt}))
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("stages: 1", "stages: 2"))
        words = ["resume", run]
    with commands(words, 2, {0: PATCH, 1: PATCH}) as running:
        codes, _, errors = running.end(timeout=120)
    assert codes == [0, 0], errors
    assert_alike(run, tmp_path / "whole")
    assert all(len(names) <= 2 for names in decisions(run).values())
    assert set(next(iter(decisions(run).values()))) == {"high", "first"}
