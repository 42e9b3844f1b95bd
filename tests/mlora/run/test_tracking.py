"""What trackers are told, in which order and how often; trackers that fail; where a run may report to."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import mlora.run.trackers as package
import pytest
from limited_runs import Watching, interrupt
from mlora.config.config_file import load_config, resolve_config
from mlora.errors import RunError
from mlora.run.reporter import Reporter
from mlora.run.run import resume, train
from mlora.run.trackers.tracked_runs import TrackedRuns
from mlora.run.trackers.tracker import Tracker
from mlora.run.trackers.tracking import Background, Tracking
from test_resume import Crashing
from tiny_run import lines, run_data, weights, write_run

from tests.layers import imported_names


class Listening(Tracker):
    """Keeps what it is told; the lists are shared by the trackers of all parts of a run."""

    place = "a list"

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def go_on(self, known: Any) -> None:
        self.told.append(("go on", sorted(known)))

    def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
        self.config, self.thread = config, threading.current_thread()
        self.told.append(("begin", adapter, known))
        return known or f"id of {adapter}"

    def log(self, adapter: str, values: Mapping[str, float], step: int) -> None:
        self.told.append((adapter, step, dict(values)))

    def end(self, adapter: str, state: str) -> None:
        self.told.append(("end", adapter, state))

    def close(self) -> None:
        self.told.append(("close",))


class Failing(Listening):
    """Fails in its third call of `log`."""

    def log(self, adapter: str, values: Mapping[str, float], step: int) -> None:
        super().log(adapter, values, step)
        if sum(len(one) == 3 and isinstance(one[1], int) for one in self.told) == 3:
            raise OSError("No space left on device\nmore")


def logged(told: list[Any], adapter: str) -> list[tuple[int, dict[str, float]]]:
    return [(one[1], one[2]) for one in told if one[0] == adapter]


def give(patch: pytest.MonkeyPatch, tracker: Tracker) -> None:
    """Let a run have a tracker."""
    patch.setattr("mlora.run.run.open_trackers", lambda config, folder: {"listening": tracker})


def start(base: Path, folder: Path, reporter: Reporter | None = None, **more: Any) -> Any:
    data = run_data(base, folder, **more)
    return train(resolve_config(data, folder=folder), reporter=reporter)


def test_what_a_tracker_is_told(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter's evaluations, its steps every `logging_steps`, and its last step."""
    told: list[Any] = []
    tracker = Listening(told)
    give(monkeypatch, tracker)
    start(tiny_base, tmp_path)
    kinds = [one for one in told if one[0] not in ("first", "second")]
    assert kinds[:2] == [("go on", []), ("begin", "first", None)]
    assert sorted(kinds[2:-1]) == [
        ("begin", "second", None),
        ("end", "first", "finished"),
        ("end", "second", "finished"),
    ]
    assert kinds[-1] == ("close",)
    steps = [(step, "eval_loss" in values) for step, values in logged(told, "first")]
    assert steps == [(0, True), (2, False), (3, True), (4, False), (6, False), (6, True)]
    assert [step for step, _ in logged(told, "second")] == [2, 4, 6, 8, 9]
    kept = {
        (line["adapter"], line["step"], "eval_loss" in line): line
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    }
    for name in ("first", "second"):
        for step, values in logged(told, name):
            line = kept[name, step, "eval_loss" in values]
            per_epoch = {"first": 6 / 3, "second": 3}[name]
            assert values == {k: v for k, v in line.items() if k not in ("adapter", "step")} | {
                "epoch": step / per_epoch
            }
    assert tracker.thread is not threading.main_thread()
    assert tracker.config["name"] == "second"
    assert tracker.config["lora"] == {"r": 7, "lora_alpha": 14, "target_modules": ["q_proj", "v_proj"]}
    assert tracker.config["seed"] == 3
    assert tracker.config["base_model"] == str(tiny_base)


@pytest.mark.parametrize("end", ["interrupted", "crashed", "crashed twice"])
def test_a_resume_goes_on_with_the_same_runs(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """No value is taken twice, though steps after the checkpoint are made again, and none is missing."""
    whole: list[Any] = []
    give(monkeypatch, Listening(whole))
    start(tiny_base, tmp_path, output_dir=str(tmp_path / "whole"))
    told: list[Any] = []
    give(monkeypatch, Listening(told))
    if end == "interrupted":
        start(tiny_base, tmp_path, Watching({("first", 3): interrupt}))
        assert ("end", "first", "interrupted") in told
    else:
        with pytest.raises(ConnectionAbortedError):
            start(tiny_base, tmp_path, Crashing(after=11))
    if end == "crashed twice":  # after fewer steps than the first time
        with pytest.raises(ConnectionAbortedError):
            resume(tmp_path / "run", reporter=Crashing(after=1))
    part = len(told)
    resume(tmp_path / "run")
    begun = [one for one in told[part:] if one[0] == "begin"]
    assert ("begin", "first", "id of first") in begun
    assert told[part] == ("go on", ["id of first", "id of second"])
    for name in ("first", "second"):
        got, expected = ([(s, "eval_loss" in v) for s, v in logged(one, name)] for one in (told, whole))
        assert got == expected
    kept = [json.loads(line) for line in (tmp_path / "run" / "tracking.jsonl").read_text().splitlines()]
    ids = [(one["adapter"], one["id"]) for one in kept if "id" in one]
    assert sorted(ids) == [("first", "id of first"), ("second", "id of second")]


def test_one_that_fails_costs_a_warning(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    give(monkeypatch, Failing(told))
    watching = Watching()
    result = start(tiny_base, tmp_path, watching)
    assert result.status == "finished"
    assert [line for line in watching.lines if "report_to" in line] == [
        "report_to: listening: OSError: No space left on device; training goes on without it"
    ]
    assert len(logged(told, "first") + logged(told, "second")) == 3
    assert ("close",) not in told
    monkeypatch.undo()
    start(tiny_base, tmp_path, output_dir=str(tmp_path / "without"))
    assert lines(tmp_path / "run") == lines(tmp_path / "without")
    assert weights(tmp_path / "run") == weights(tmp_path / "without")


def test_one_that_hangs_delays_the_end_only(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training does not wait for it; the end of the run does, for as long as `patience` says."""
    free = threading.Event()

    class Hanging(Listening):
        def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
            free.wait()
            return super().begin(adapter, known, config)

    told: list[Any] = []
    give(monkeypatch, Hanging(told))
    monkeypatch.setattr(Tracking.__init__, "__defaults__", (0.2,))
    watching = Watching()
    try:
        assert start(tiny_base, tmp_path, watching).status == "finished"
        assert [line for line in watching.lines if "report_to" in line] == [
            "report_to: listening: did not take all values within 0.2 s; training goes on without it"
        ]
    finally:
        free.set()


def test_the_end_waits_once_for_all_trackers(tiny_base: Path, tmp_path: Path) -> None:
    waited = []

    class Waits(Background):
        def wait(self, seconds: float) -> bool:
            waited.append(seconds)
            return super().wait(0.0 if self.tracker.told else seconds)

    def exits() -> None:
        raise SystemExit("from a library")

    one, two = Waits(Listening([])), Waits(Listening(["hangs"]))
    free = threading.Event()
    two.tell(free.wait)
    one.tell(exits)
    config = resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path)
    watching = Watching()
    tracking = Tracking(config, {}, TrackedRuns(tmp_path / "tracking.jsonl"), watching, 50.0)
    tracking._trackers = {"two": two, "one": one}
    try:
        tracking.close()
        assert waited[1] <= waited[0] <= 50.0
        assert watching.lines == [
            "report_to: two: did not take all values within 50 s; training goes on without it",
            "report_to: one: SystemExit: from a library; training goes on without it",
        ]
    finally:
        free.set()


def test_only_an_interrupted_run_is_left_open(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped adapter ends as stopped."""
    told: list[Any] = []
    give(monkeypatch, Listening(told))
    data = run_data(tiny_base, tmp_path)
    data["adapters"][1] |= {"learning_rate": 1e30, "max_grad_norm": 0}
    result = train(resolve_config(data, folder=tmp_path))
    assert result.adapters["second"].state == "stopped"
    assert ("end", "second", "stopped") in told
    assert ("end", "first", "finished") in told


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("none", []),
        (None, []),
        ([], []),
        ("wandb", ["wandb"]),
        (["mlflow", "tensorboard", "mlflow"], ["mlflow", "tensorboard"]),
        (["none", "trackio"], ["trackio"]),
        ("all", ["tensorboard", "trackio"]),
    ],
)
def test_values_of_report_to(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, expected: list[str]
) -> None:
    here = {"tensorboard": "a file", "wandb": None, "trackio": "a file"}  # wandb: a folder of that name
    monkeypatch.setattr(
        "mlora.config.tracking.find_spec",
        lambda name: ModuleSpec(name, None, origin=here[name]) if name in here else None,
    )
    config = resolve_config(run_data(tiny_base, tmp_path, report_to=value), folder=tmp_path)
    assert config.report_to == expected
    assert resolve_config(config.model_dump(), folder=tmp_path) == config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"report_to": "wandbb"}, "report_to: 'wandbb' is unknown; did you mean 'wandb'?"),
        ({"report_to": ["tb"]}, "report_to: 'tb' is unknown; did you mean 'tensorboard'?"),
        (
            {"report_to": "clearml"},
            "report_to: must be one of tensorboard, wandb, mlflow, trackio, all or none, got 'clearml'",
        ),
        ({"report_to": 3}, "report_to: must be a list of entries that begin with '- ', got 3"),
        ({"wandb_project": "x"}, "wandb_project: unknown key; did you mean 'project'?"),
        ({"reportto": "wandb"}, "reportto: unknown key; did you mean 'report_to'?"),
    ],
)
def test_wrong_values_of_report_to(
    tiny_base: Path, tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(RunError) as caught:
        resolve_config(run_data(tiny_base, tmp_path, **change), folder=tmp_path)
    assert expected in str(caught.value)


def test_a_missing_package_is_refused_before_training(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora.config.tracking.find_spec", lambda name: None)
    with pytest.raises(
        RunError, match=r"report_to: wandb, mlflow are not installed: pip install wandb mlflow"
    ):
        start(tiny_base, tmp_path, report_to=["wandb", "mlflow"])
    assert not (tmp_path / "run").exists()


def test_a_resume_may_change_it(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that began without trackers gets one, which begins where the checkpoint is."""
    start(tiny_base, tmp_path, Watching({("first", 2): interrupt}))
    told: list[Any] = []
    give(monkeypatch, Listening(told))
    resume(tmp_path / "run", settings=["report_to=[]", "run_name=later"])
    assert ("begin", "first", None) in told
    assert logged(told, "first")[0][0] == 3
    assert load_config(tmp_path / "run" / "config.yaml").run_name == "later"


def test_overwriting_removes_what_tracking_wrote(tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    train(path)
    run = tmp_path / "run"
    (run / "tracking.jsonl").write_text("")
    (run / "logs" / "first").mkdir(parents=True)
    (run / "logs" / "first" / "events.out.tfevents.1.host.2.0").write_bytes(b"")
    (run / "logs" / "mine.txt").write_text("")
    with pytest.raises(RunError, match=r"logs/mine\.txt was not written by a run"):
        train(path, overwrite=True)
    (run / "logs" / "mine.txt").unlink()
    train(path, overwrite=True)
    assert not (run / "logs").exists()
    assert not (run / "tracking.jsonl").exists()


def test_a_damaged_file_is_named(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete last line, as of a killed process, is none."""
    give(monkeypatch, Listening([]))
    start(tiny_base, tmp_path, Watching({("first", 3): interrupt}))
    path = tmp_path / "run" / "tracking.jsonl"
    before = path.read_text()
    path.write_text('{"tracker": "wandb", "adapter": "first", "steps": "many"}\n')
    with pytest.raises(
        RunError, match=r"tracking\.jsonl:1: steps: .*; remove the file to begin new tracking"
    ):
        resume(tmp_path / "run")
    path.write_text(before + '{"tracker": "wa')
    assert resume(tmp_path / "run").status == "finished"


def test_libraries_are_imported_on_demand_only() -> None:
    """No file imports the file of a tracker, so a run that asks for none imports no library of tracking."""
    folder = Path(str(package.__file__)).parent
    root = folder.parents[2]
    asked = {f"mlora.run.trackers.{name}" for name in ("tensorboard", "wandb", "mlflow", "trackio")}
    assert asked == {f"mlora.run.trackers.{p.stem}" for p in folder.glob("*.py")} & asked
    for path in (root / "mlora").rglob("*.py"):
        for name in imported_names(path, root):
            assert not name.startswith(tuple(asked)), path
            libraries = ("wandb", "mlflow", "trackio", "torch.utils.tensorboard")
            assert path.parent == folder or not name.startswith(libraries), path


def test_time_of_a_run_is_not_the_trackers(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps are made before a slow tracker has taken the first one."""

    class Slow(Listening):
        def begin(self, adapter: str, known: str | None, config: Mapping[str, Any]) -> str:
            done.wait(60)
            return super().begin(adapter, known, config)

    done, told = threading.Event(), list[Any]()
    give(monkeypatch, Slow(told))
    before: list[int] = []

    def note() -> None:
        before.append(len(told))
        done.set()

    start(tiny_base, tmp_path, Watching({("first", 6): note}))
    assert before == [1]  # only `go on`
    assert len(logged(told, "second")) == 5
