"""Transformers' callbacks per adapter: what they see, what they may ask for, and resumes with them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from limited_runs import Watching, ask, five_tasks, interrupt, replace_memory, submission
from mlora.config.config_file import load_config, resolve_config
from mlora.errors import RunError
from mlora.run.run import resume, train
from mlora.tasks.result import RunResult
from test_best import evaluations, worsening
from test_resume import Crashing
from tiny_run import lines, losses, run_data, weights, write_jsonl, write_run
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

EVENTS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_step_end",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_train_end",
]


class Noting(TrainerCallback):
    """Notes each event: its name, the step and the epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def note(args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            self.seen.append((name, state.global_step, round(state.epoch, 6)))

        return note


class Does(TrainerCallback):
    """Does something in one event."""

    def __init__(self, event: str, what: Callable[[TrainerState, TrainerControl], object]) -> None:
        self.event, self.what = event, what

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name != self.event:
            return super().__getattribute__(name)

        def call(args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            self.what(state, control)

        return call


class Counting(TrainerCallback, ExportableState):
    """Counts its steps over all parts of a run, and ends the training after some."""

    def __init__(self, most: int = 7, counted: int = 0) -> None:
        self.most, self.counted = most, counted

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.counted += 1
        control.should_training_stop = self.counted >= self.most

    def state(self) -> dict[str, Any]:
        return {"args": {"most": self.most}, "attributes": {"counted": self.counted}}


def of(name: str, *callbacks: TrainerCallback) -> Callable[[str], list[TrainerCallback]]:
    """A function that gives callbacks to the adapter with this name only."""
    return lambda adapter: list(callbacks) if adapter == name else []


def run(data: dict[str, Any], folder: Path, *callbacks: Any, name: str = "run", **more: Any) -> RunResult:
    config = resolve_config(data | {"output_dir": str(folder / name)}, folder=folder)
    return train(config, callbacks=list(callbacks), **more)


def test_early_stopping_of_transformers_stops_where_ours_does(tiny_base: Path, tmp_path: Path) -> None:
    """With the same patience the run is the same, in each number, as with `early_stopping_patience`."""
    data = worsening(tiny_base, tmp_path, metric_for_best_model="loss")
    theirs = run(data, tmp_path, of("first", EarlyStoppingCallback(2)), name="theirs")
    data["adapters"][0]["early_stopping_patience"] = 2
    ours = run(data, tmp_path, name="ours")
    assert lines(tmp_path / "theirs") == lines(tmp_path / "ours")
    assert weights(tmp_path / "theirs") == weights(tmp_path / "ours")
    first = theirs.adapters["first"]
    assert (first.state, first.message) == ("finished", "stopped by EarlyStoppingCallback")
    assert first.step == ours.adapters["first"].step < 10
    assert first.saved_step == ours.adapters["first"].saved_step < first.step
    assert theirs.adapters["second"].step == 9
    assert theirs.exit_code == 0


@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_it_stops_where_its_own_rule_says(tiny_base: Path, tmp_path: Path, threshold: float) -> None:
    """The rule written out by hand, over the losses that were measured."""
    data = worsening(tiny_base, tmp_path, metric_for_best_model="eval_loss")
    result = run(data, tmp_path, of("first", EarlyStoppingCallback(3, threshold)))
    found = evaluations(tmp_path / "run")
    assert result.adapters["first"].step == max(found)
    best, worse = float("inf"), []
    for one in found.values():
        gain = best - one["eval_loss"]
        worse.append(gain <= threshold)
        best = min(best, one["eval_loss"])
    assert worse[-3:] == [True] * 3
    assert [True] * 3 not in [worse[at : at + 3] for at in range(len(worse) - 3)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("end", ["interrupted", "crashed"])
def test_a_resumed_run_is_the_same(tiny_base: Path, tmp_path: Path, stages: int, end: str) -> None:
    """Interrupted or cut off in the middle of the callbacks' counts."""
    data = worsening(tiny_base, tmp_path, metric_for_best_model="loss")
    data["pipeline"] = {"stages": stages, "partition": [1, 1] if stages == 2 else None}

    def given(name: str) -> TrainerCallback:
        return EarlyStoppingCallback(3) if name == "first" else Counting(7)

    whole = run(data, tmp_path, given, name="whole")
    assert [one.step for one in whole.adapters.values()] == [max(evaluations(tmp_path / "whole")), 7]
    step = whole.adapters["first"].step - 1
    if end == "interrupted":
        assert run(data, tmp_path, given, reporter=Watching({("first", step): interrupt})).status == end
    else:
        with pytest.raises(ConnectionAbortedError):
            run(data, tmp_path, given, reporter=Crashing(after=2 * step))
    again = resume(tmp_path / "run", callbacks=[given])
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert [one.message for one in again.adapters.values()] == [
        "stopped by EarlyStoppingCallback",
        "stopped by Counting",
    ]


@pytest.mark.parametrize("step", [2, 5, 9])
def test_they_wait_with_their_adapter(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Under a limit on memory, tasks are set aside and come back, also over an interruption."""
    replace_memory(monkeypatch)
    noted: dict[str, list[str]] = {}

    class Beginning(Counting):
        def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            noted.setdefault(args.run_name, []).append("begin")

    data = five_tasks(tiny_base, tmp_path, fit=2)
    whole = run(data, tmp_path, lambda name: Beginning(2), name="whole")
    assert [one.step for one in whole.adapters.values()] == [2] * 5
    assert set(map(len, noted.values())) == {1}  # also of those that were set aside
    watching = Watching({step: interrupt})
    assert run(data, tmp_path, lambda name: Beginning(2), reporter=watching).status == "interrupted"
    resume(tmp_path / "run", callbacks=[lambda name: Beginning(2)])
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_resume_without_them_says_so(tiny_base: Path, tmp_path: Path) -> None:
    watching = Watching({("first", 1): interrupt})
    data = run_data(tiny_base, tmp_path)
    assert run(data, tmp_path, of("second", Counting(5)), reporter=watching).status == "interrupted"
    told = Watching()
    assert resume(tmp_path / "run", reporter=told).adapters["second"].step == 9
    warned = [line for line in told.lines if "Counting" in line]
    assert len(warned) == 1
    assert warned[0].startswith("second: goes on without callbacks that it began with: Counting;")


def test_events_are_those_of_trainer(tiny_base: Path, tmp_path: Path) -> None:
    """At each step the same events as often, with the same epoch, as `Trainer` of Transformers has."""
    rows = [{"input_ids": [3 + i, 5, 7], "labels": [3 + i, 5, 7]} for i in range(7)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    steps = {"logging_steps": 1, "eval_steps": 3, "save_steps": 4, "max_steps": 6}
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    theirs = Noting()
    arguments = TrainingArguments(
        str(tmp_path / "trainer"),
        eval_strategy="steps",
        eval_on_start=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **steps,
        **batches,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[theirs]).train()
    data = run_data(tiny_base, tmp_path)
    data["datasets"] = [{"name": "rows", "path": "rows.jsonl", "format": "tokens"}]
    lora = {"r": 2, "target_modules": ["q_proj"]}
    data["adapters"] = [{"name": "a", "dataset": "rows", "eval_dataset": "rows", "lora": lora}]
    data["defaults"] = {**steps, "eval_steps": None, **batches}
    data["adapters"][0]["eval_steps"] = 3
    ours = Noting()
    run(data, tmp_path, of("a", ours))
    assert Counter(ours.seen) == Counter(theirs.seen)
    names = [name for name, _, _ in ours.seen]
    assert names[:3] == ["on_train_begin", "on_evaluate", "on_epoch_begin"]
    assert names[-1] == "on_train_end"
    order = [EVENTS.index(name) for name in names if name in EVENTS[2:7]]
    assert order == [2, 3, 3, 4, 5, 6, 2, 4, 5, 6] * 3  # 4 micro-batches an epoch: 3 and 1


def test_what_a_callback_sees(tiny_base: Path, tmp_path: Path) -> None:
    """Arguments with the adapter's values, its state, and logs as `Trainer` has them."""
    seen: dict[str, Any] = {}

    class Looking(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["args"], seen["kwargs"] = args, kwargs

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.setdefault("logs", []).append((state.global_step, dict(logs)))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            seen.setdefault("bests", []).append(state.best_metric)
            seen.setdefault("metrics", []).append(dict(metrics))

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["state"] = state
            seen["saved"] = sorted(path.name for path in Path(args.output_dir).iterdir())

    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {
        "warmup_steps": 0.5,
        "load_best_model_at_end": True,
        "lr_scheduler_type": "cosine",
        "optim": "sgd",
    }
    run(data, tmp_path, lambda name: Looking() if name == "first" else None)
    args = seen["args"]
    assert isinstance(args, TrainingArguments)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.max_steps) == (2, 3, 6)
    assert (args.learning_rate, args.warmup_steps, args.logging_steps) == (5e-3, 0.5, 2)
    assert (args.eval_strategy, args.eval_steps) == (IntervalStrategy.STEPS, 3)
    assert (args.metric_for_best_model, args.greater_is_better) == ("loss", False)
    assert (args.optim.value, args.lr_scheduler_type.value) == ("sgd", "cosine")
    assert args.device.type == "cpu"
    assert args.world_size == 1
    assert '"max_steps": 6' in args.to_json_string()
    assert set(seen["kwargs"].values()) == {None}
    assert seen["kwargs"].keys() >= {"model", "optimizer", "train_dataloader"}
    state = seen["state"]
    assert (state.global_step, state.max_steps, state.logging_steps, state.eval_steps) == (6, 6, 2, 3)
    assert state.epoch == 3.0  # 11 samples in batches of 2: 6 an epoch, and 18 were taken
    mine = [line for line in lines(tmp_path / "run") if line["adapter"] == "first"]
    trained = {line["step"]: line for line in mine if "loss" in line}
    evaluated = {line["step"]: line for line in mine if "eval_loss" in line}
    assert [step for step, logs in seen["logs"] if "loss" in logs] == [2, 4, 6]
    for step, logs in seen["logs"]:
        kept = trained[step] if "loss" in logs else evaluated[step]
        same = ("loss", "learning_rate", "grad_norm") if "loss" in logs else ("eval_loss",)
        assert all(logs[key] == kept[key] for key in same)
        assert logs["epoch"] == step / 2
    assert [one["eval_loss"] for one in seen["metrics"]] == [evaluated[s]["eval_loss"] for s in (0, 3, 6)]
    assert seen["bests"][:2] == [None, None]
    assert seen["bests"][2] == evaluated[3]["eval_loss"]  # the best before this evaluation, as in Trainer
    assert state.best_global_step == min((3, 6), key=lambda step: evaluated[step]["eval_loss"])
    assert [one["step"] for one in state.log_history] == [0, 2, 3, 4, 6, 6]
    assert "adapter_model.safetensors" in seen["saved"]


def test_what_a_callback_may_ask_for(tiny_base: Path, tmp_path: Path) -> None:
    """An evaluation, a log and a checkpoint at step 1; no evaluation at step 3, where one is due."""

    def asks(state: TrainerState, control: TrainerControl) -> None:
        first = state.global_step == 1
        control.should_log = first
        control.should_save = first
        control.should_evaluate = first

    logged: list[int] = []
    saved: list[int] = []
    data = run_data(tiny_base, tmp_path)
    data["defaults"] |= {"logging_steps": 3, "save_steps": None}
    run(
        data,
        tmp_path,
        of("first", Does("on_step_end", asks)),
        of("first", Does("on_log", lambda state, _: logged.append(state.global_step))),
        of("first", Does("on_save", lambda state, _: saved.append(state.global_step))),
    )
    evaluated = [line["step"] for line in lines(tmp_path / "run") if "eval_loss" in line]
    assert evaluated == [0, 1]
    assert logged == [0, 1, 1]  # its evaluations, too, are logs
    assert saved == [1, 6]


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"])
def test_what_is_asked_for_before_a_step_ends_counts(tiny_base: Path, tmp_path: Path, event: str) -> None:
    """`Trainer`, too, keeps what a callback asks for from the begin of a step to its end."""

    def asks(state: TrainerState, control: TrainerControl) -> None:
        if state.global_step == 3:  # before step 4
            control.should_evaluate = control.should_log = control.should_save = True

    data = run_data(tiny_base, tmp_path)
    data["defaults"] |= {"logging_steps": 9, "save_steps": None}
    seen: dict[str, list[int]] = {"on_log": [], "on_save": []}
    noting = [
        Does(name, lambda state, _, steps=steps: steps.append(state.global_step))
        for name, steps in seen.items()
    ]
    run(data, tmp_path, of("first", Does(event, asks), *noting))
    evaluated = [line["step"] for line in lines(tmp_path / "run") if "eval_loss" in line]
    assert evaluated == [0, 3, 4, 6]
    assert seen == {"on_log": [0, 3, 4, 4, 6, 6], "on_save": [4, 6]}


def test_the_last_step_asks_to_stop(tiny_base: Path, tmp_path: Path) -> None:
    """As ``DefaultFlowCallback`` of Transformers does, before other callbacks see the step's end."""
    seen: list[bool] = []
    last = Does("on_step_end", lambda _, control: seen.append(control.should_training_stop))
    result = run(run_data(tiny_base, tmp_path), tmp_path, of("first", last))
    assert seen == [False] * 5 + [True]
    assert (result.adapters["first"].state, result.adapters["first"].message) == ("finished", "")


def test_a_stop_ends_one_adapter_with_its_weights(tiny_base: Path, tmp_path: Path) -> None:
    """The other one trains as without it; the weights are those of the last step."""

    def stop(state: TrainerState, control: TrainerControl) -> None:
        control.should_training_stop = state.global_step == 4

    data = run_data(tiny_base, tmp_path)
    result = run(data, tmp_path, of("second", Does("on_step_end", stop)))
    run(data, tmp_path, name="alone")
    second = result.adapters["second"]
    assert (second.state, second.step, second.saved_step) == ("finished", 4, 4)
    assert losses(tmp_path / "run", "first") == pytest.approx(losses(tmp_path / "alone", "first"), rel=1e-5)
    data["defaults"]["max_steps"] = 4
    data["adapters"][1]["max_steps"] = 9
    assert losses(tmp_path / "run", "second") == losses(tmp_path / "alone", "second")[:4]
    assert set(weights(tmp_path / "run")) == {"first", "second"}


@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_step_begin", "on_step_end", "on_evaluate", "on_log", "on_save"]
)
def test_one_that_raises_stops_its_adapter(tiny_base: Path, tmp_path: Path, event: str) -> None:
    """The error names the adapter, the callback, the event and the line; the other adapter goes on."""

    def fail(state: TrainerState, control: TrainerControl) -> None:
        raise KeyError("no such thing")

    told = Watching()
    result = run(run_data(tiny_base, tmp_path), tmp_path, of("first", Does(event, fail)), reporter=told)
    first = result.adapters["first"]
    assert first.state == "stopped"
    assert first.message.startswith(f"the callback Does failed in {event}: KeyError: 'no such thing', in ")
    assert f"{__file__}:" in first.message
    assert result.adapters["second"].step == 9
    assert result.exit_code == 1


def test_one_that_raises_at_the_end_costs_a_warning(tiny_base: Path, tmp_path: Path) -> None:
    def fail(state: TrainerState, control: TrainerControl) -> None:
        raise OSError("the server is away")

    told = Watching()
    result = run(
        run_data(tiny_base, tmp_path), tmp_path, of("first", Does("on_train_end", fail)), reporter=told
    )
    assert result.exit_code == 0
    warned = [line for line in told.lines if "Does" in line]
    assert len(warned) == 1
    assert warned[0].startswith(
        "first: the callback Does failed in on_train_end: OSError: the server is away"
    )


def test_early_stopping_without_a_metric_is_refused_by_its_own_check(tiny_base: Path, tmp_path: Path) -> None:
    result = run(run_data(tiny_base, tmp_path), tmp_path, of("first", EarlyStoppingCallback()))
    first = result.adapters["first"]
    assert (first.state, first.step) == ("stopped", 0)
    assert "requires metric_for_best_model to be defined" in first.message


def test_each_adapter_has_its_own(tiny_base: Path, tmp_path: Path) -> None:
    """A class is made anew, and an instance copied, for each adapter."""
    made: dict[int, set[int]] = {}

    class Mine(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            made.setdefault(id(self), set()).add(state.max_steps)

    instance = Noting()
    run(run_data(tiny_base, tmp_path), tmp_path, Mine, instance)
    assert sorted(map(sorted, made.values())) == [[6], [9]]
    assert instance.seen == []


class Locked(TrainerCallback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Needing(TrainerCallback):
    def __init__(self, needed: int) -> None:
        pass


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            Locked(),
            r"first: callbacks\[0\]: cannot be copied: TypeError: cannot pickle .*; give its class, or",
        ),
        (Needing, r"first: callbacks\[0\]: TypeError: .*missing 1 required positional argument: 'needed'"),
        (lambda name: 3, r"first: callbacks\[0\]: expected a TrainerCallback of Transformers, got int"),
    ],
)
def test_what_cannot_be_made_refuses_the_run(
    tiny_base: Path, tmp_path: Path, given: Any, expected: str
) -> None:
    with pytest.raises(RunError, match=expected):
        run(run_data(tiny_base, tmp_path), tmp_path, given)
    assert not (tmp_path / "run").exists()


def test_what_is_no_callback_is_a_type_error(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"callbacks\[1\]: expected a TrainerCallback, its class, or a function"
    ):
        run(run_data(tiny_base, tmp_path), tmp_path, Noting, "EarlyStoppingCallback")


FILE = """
from transformers import TrainerCallback

class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
"""


def test_callbacks_of_the_yaml(tiny_base: Path, tmp_path: Path) -> None:
    """A class of a file beside the YAML and one of a package; a resume needs nothing more."""
    (tmp_path / "stop_at.py").write_text(FILE)
    data = worsening(tiny_base, tmp_path, metric_for_best_model="loss")
    early = {"name": "transformers:EarlyStoppingCallback", "early_stopping_patience": 2}
    data["adapters"][0]["callbacks"] = [early]
    data["defaults"]["callbacks"] = [{"name": "stop_at.py:StopAt", "step": 5}]
    config = load_config(write_run(tmp_path, data))
    assert config.adapters[1].callbacks == [{"name": f"{tmp_path / 'stop_at.py'}:StopAt", "step": 5}]
    assert train(config, reporter=Watching({("first", 2): interrupt})).status == "interrupted"
    result = resume(tmp_path / "run")
    assert result.adapters["first"].message == "stopped by EarlyStoppingCallback"
    second = result.adapters["second"]
    assert (second.step, second.message) == (5, "stopped by StopAt")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("StopAt", r"callbacks: expected file\.py:Class or module:Class, or a mapping"),
        (
            "transformers:EarlyStopingCallback",
            r"first: callbacks\[0\]: transformers:EarlyStopingCallback: cannot",
        ),
        ("gone.py:StopAt", r"first: callbacks\[0\]: gone\.py:StopAt: cannot be imported"),
        ("stop_at.py:StopsAt", r"cannot be imported: it has no 'StopsAt'; did you mean 'StopAt'\?"),
        ("stop_at.py:StopAt", r"first: callbacks\[0\]: TypeError: .*'step'"),
    ],
)
def test_wrong_callbacks_of_the_yaml(tiny_base: Path, tmp_path: Path, value: str, expected: str) -> None:
    (tmp_path / "stop_at.py").write_text(FILE)
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0]["callbacks"] = [value]
    with pytest.raises(RunError, match=expected):
        train(load_config(write_run(tmp_path, data)))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_resolved_config_holds_them(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "stop_at.py").write_text(FILE)
    data = run_data(tiny_base, tmp_path)
    data["defaults"] |= {"max_steps": 1, "callbacks": [{"name": "stop_at:StopAt", "step": 1}]}
    train(load_config(write_run(tmp_path, data)))
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert kept["adapters"][0]["callbacks"] == [{"name": f"{tmp_path / 'stop_at.py'}:StopAt", "step": 1}]


def test_one_that_joins_and_cannot_be_made_is_stopped(tiny_base: Path, tmp_path: Path) -> None:
    """The run goes on: only an adapter of its own config refuses it before training."""
    data = run_data(tiny_base, tmp_path)
    late = submission(data, tmp_path, "late", callbacks=["transformers:NoSuchCallback"])
    joining = Watching({("second", 2): lambda: ask(tmp_path / "run", "submit", "late", late)})
    result = run(data, tmp_path, reporter=joining)
    assert (result.adapters["late"].state, result.adapters["late"].step) == ("stopped", 0)
    assert "callbacks[0]: transformers:NoSuchCallback: cannot be imported" in result.adapters["late"].message
    assert [result.adapters[name].step for name in ("first", "second")] == [6, 9]


def test_a_state_that_cannot_be_kept_stops_its_adapter(tiny_base: Path, tmp_path: Path) -> None:
    class Odd(Counting):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"odd": {1, 2}}}

    result = run(run_data(tiny_base, tmp_path), tmp_path, of("second", Odd(99)))
    second = result.adapters["second"]
    assert second.message.startswith("a callback failed in state: TypeError: Object of type set is not JSON")
    assert (second.step, result.adapters["first"].step) == (2, 6)


def test_a_state_that_cannot_be_restored_refuses_the_resume(tiny_base: Path, tmp_path: Path) -> None:
    """Nothing is lost: with the right class the run goes on."""

    class Changed(TrainerCallback, ExportableState):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {}}

    Changed.__name__ = "Counting"
    watching = Watching({("first", 1): interrupt})
    run(run_data(tiny_base, tmp_path), tmp_path, of("second", Counting(5)), reporter=watching)
    with pytest.raises(
        RunError, match=r"second: callbacks: their states cannot be restored: TypeError: .* no arguments"
    ):
        resume(tmp_path / "run", callbacks=[of("second", Changed())])
    assert resume(tmp_path / "run", callbacks=[of("second", Counting(5))]).adapters["second"].step == 5


def test_trials_have_callbacks(tiny_base: Path, tmp_path: Path) -> None:
    """Of a file beside the YAML, named among the fields that all trials share."""
    (tmp_path / "stop_at.py").write_text(FILE)
    data = run_data(tiny_base, tmp_path)
    shared = {"dataset": "two", "eval_dataset": "one", "lora": {"r": 2, "target_modules": ["q_proj"]}}
    shared["callbacks"] = [{"name": "stop_at.py:StopAt", "step": 2}]
    search = {"learning_rate": {"choice": [1e-3, 1e-4]}}
    del data["adapters"]
    data["sweep"] = {"sampler": "grid", "metric": "eval_loss", "adapter": shared, "search": search}
    result = train(load_config(write_run(tmp_path, data)))
    assert [one.step for one in result.adapters.values()] == [2, 2]
    assert {one.message for one in result.adapters.values()} == {"stopped by StopAt"}
