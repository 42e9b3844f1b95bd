"""The search space of a sweep, what its config refuses, and its study."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from mlora.config.config_file import dump_config, load_config, resolve_config
from mlora.config.search_space import corners, grid_point, grid_size, read_space, with_params
from mlora.config.sweep_config import SweepConfig
from mlora.errors import RunError
from mlora.sweep.study import Study, check_arguments
from pydantic import ValidationError
from sweep_data import SEARCH, sweep_data
from tiny_run import run_data, write_run


def test_fields_of_a_trial() -> None:
    space = read_space(SEARCH)
    assert list(space) == ["learning_rate", "lora.r", "lora.target_modules"]
    params = {"learning_rate": 0.001, "lora.r": 8, "lora.target_modules": '["q_proj"]'}
    fixed = {"dataset": "one", "lora": {"r": 2, "lora_alpha": 4}}
    assert with_params(fixed, space, params) == {
        "dataset": "one",
        "learning_rate": 0.001,
        "lora": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj"]},
    }
    assert fixed == {"dataset": "one", "lora": {"r": 2, "lora_alpha": 4}}


def test_grid() -> None:
    space = read_space({"a": {"choice": [None, "x"]}, "b": {"low": 0.1, "high": 0.3, "step": 0.1}})
    assert grid_size(space) == 6
    points = [with_params({}, space, grid_point(space, number)) for number in range(6)]
    assert [point["a"] for point in points] == [None, None, None, "x", "x", "x"]
    assert [point["b"] for point in points] == pytest.approx([0.1, 0.2, 0.3] * 2)
    assert max(point["b"] for point in points) <= 0.3
    large = {"a": {"low": 1, "high": 2**32}, "b": {"low": 0, "high": 9}}
    assert grid_size(read_space(large)) == 10 * 2**32
    assert read_space({"a": {"low": 2, "high": 9, "step": 3}})["a"].member(2) == 8
    dotted = {"lora": {"rank_pattern": {"layers.0.q_proj": {"choice": [2, 4]}}}}
    (path,) = read_space(dotted)
    point = with_params({}, read_space(dotted), {path: "4"})
    assert point == {"lora": {"rank_pattern": {"layers.0.q_proj": 4}}}
    assert grid_size(read_space({"a": {"low": 2, "high": 9}})) == 8
    assert grid_size(read_space({"a": {"low": 0.0, "high": 1.0}})) is None
    assert grid_size(read_space({"a": {"low": 1, "high": 8, "log": True}})) is None


def test_corners_hold_every_choice_and_bound() -> None:
    space = read_space(SEARCH)
    seen = list(corners(space))
    for name, values in (("learning_rate", {1e-5, 1e-2}), ("lora.r", {4, 16})):
        assert {point[name] for point in seen} == values
    assert {point["lora.target_modules"] for point in seen} == {"all-linear", '["q_proj"]'}


@pytest.mark.parametrize(
    ("search", "key", "message"),
    [
        ({}, "", "must not be empty"),
        ({"a": 3}, "a", "must be {choice"),
        ({"a": {}}, "a", "must be {choice"),
        ({"a": {"b": [1]}}, "a.b", "must be {choice"),
        ({"a": {"choice": []}}, "a.choice", "must be a list of values"),
        ({"a": {"choice": "x"}}, "a.choice", "must be a list of values"),
        ({"a": {"choice": [1, 1]}}, "a.choice", "1 is listed twice"),
        ({"a": {"choice": [1], "low": 1}}, "a", "choice cannot be combined with low"),
        ({"a": {"low": 1}}, "a.high", "is missing"),
        ({"a": {"high": 1}}, "a.low", "is missing"),
        ({"a": {"low": 2, "high": 1}}, "a.high", "must be at least low"),
        ({"a": {"low": True, "high": 1}}, "a.low", "must be a number"),
        ({"a": {"low": 0, "high": math.inf}}, "a.high", "must be a number"),
        ({"a": {"low": 0, "high": 1, "log": True}}, "a.low", "above 0"),
        ({"a": {"low": 1, "high": 2, "log": 1}}, "a.log", "true or false"),
        ({"a": {"low": 1, "high": 2, "log": True, "step": 1}}, "a.step", "cannot be combined with log"),
        ({"a": {"low": 1, "high": 2, "step": 0}}, "a.step", "above 0"),
        ({"a": {"low": 1, "high": 2, "step": 0.5}}, "a.step", "whole number"),
        ({"a": {"low": 1, "high": 2, "lgo": True}}, "a.lgo", "unknown key"),
    ],
)
def test_what_a_space_refuses(search: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message.replace("{", r"\{")) as caught:
        read_space(search)
    assert ".".join(map(str, caught.value.errors()[0]["loc"])) == key


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"trials": None}, "sweep.trials: is missing"),
        ({"trials": 0}, "sweep.trials: must be at least 1"),
        ({"sampler": "grid"}, "sweep.sampler: grid needs"),
        ({"metric": "eval_exact_match"}, "sweep.adapter.eval_exact_match: must be true"),
        ({"metric": "exact_match"}, "sweep.adapter.eval_exact_match: must be true"),
        (
            {"metric": "eval_los"},
            "sweep.metric: 'eval_los' is not measured with objective cross_entropy; did",
        ),
        (
            {"metric": "kl"},
            "sweep.metric: 'eval_kl' is not measured with objective cross_entropy; metrics: loss",
        ),
        (
            {"metric": "accuracy"},
            "sweep.metric: accuracy needs lora.task_type: SEQ_CLS or TOKEN_CLS or QUESTION_ANS",
        ),
        (
            {"metric": "accuracy", "search": {"lora": {"task_type": {"choice": ["SEQ_CLS", "CAUSAL_LM"]}}}},
            "sweep.metric: accuracy needs lora.task_type: SEQ_CLS",
        ),
        (
            {"metric": "accuracy", "pruner": "median"},
            "sweep.pruner: needs the metric eval_loss, got",
        ),
        (
            {"metric": "kl", "search": {"objective": {"choice": ["kto", "dpo"]}}},
            "sweep.metric: 'eval_kl' is not measured with objective dpo; metrics: loss, rewards/accuracies",
        ),
        (
            {"metric": "rewards/margins", "search": {"objective": {"choice": ["dpoo"]}}},
            "sweep.search.objective: 'dpoo' is unknown; did you mean 'dpo'?",
        ),
        ({"pruner_kwargs": {"a": 1}}, "sweep.pruner_kwargs: pruner is none; set a pruner or remove this key"),
        (
            {"sampler_kwargs": {"seed": 1}},
            "sweep.sampler_kwargs.seed: the sampler takes the run's seed",
        ),
        (
            {"search": {"lora": {"rr": {"choice": [1]}}}},
            "sweep.search.lora.rr: unknown key; did you mean 'r'?",
        ),
        ({"search": {"lora": {"r": {"choice": [4, 0]}}}}, "sweep.search.lora.r: must be at least 1, got 0"),
        (
            {"search": {"learning_rat": {"choice": [1]}}},
            "sweep.search.learning_rat: unknown key; did you mean",
        ),
        (
            {"search": {"dataset": {"choice": ["one", "three"]}}},
            "sweep.search.dataset: no dataset is named 'three'",
        ),
        ({"search": {"name": {"choice": ["a"]}}}, "sweep.search.name: the run names its trials"),
        ({"search": []}, "sweep.search: must be keys and values"),
        ({"adapter": {"name": "a"}}, "sweep.adapter.name: the run names its trials"),
        ({"adapter": {"dataset": "one"}}, "sweep.adapter.eval_dataset: is missing"),
        ({"adapter": {"eval_dataset": "two", "lora": {}}}, "sweep.adapter.dataset: is missing"),
        ({"palces": 4}, "sweep.palces: unknown key; did you mean 'places'?"),
    ],
)
def test_what_a_config_refuses(tiny_base: Path, tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(RunError) as caught:
        load_config(write_run(tmp_path, sweep_data(tiny_base, tmp_path, **changes)))
    (found,) = str(caught.value).splitlines()
    assert line in found


def test_accuracy_needs_trials_that_measure_it(tiny_base: Path, tmp_path: Path) -> None:
    """A folder in `init_from` says itself what its adapter is."""
    data = sweep_data(tiny_base, tmp_path, metric="accuracy")
    for dataset in data["datasets"]:
        dataset["format"] = "classification"
    adapter = data["sweep"]["adapter"]
    adapter["lora"]["task_type"] = "SEQ_CLS"
    assert resolve_config(data, folder=tmp_path).sweep is not None
    adapter["problem_type"] = "regression"
    with pytest.raises(RunError, match=r"sweep\.metric: a regression has no accuracy; use loss"):
        resolve_config(data, folder=tmp_path)
    del adapter["problem_type"], adapter["lora"]
    adapter["init_from"], data["sweep"]["search"] = "start", {"learning_rate": {"choice": [1e-3]}}
    assert resolve_config(data, folder=tmp_path).sweep is not None


def test_a_pruner_needs_evaluations(tiny_base: Path, tmp_path: Path) -> None:
    data = sweep_data(tiny_base, tmp_path, pruner="median")
    del data["sweep"]["adapter"]["eval_steps"]
    with pytest.raises(RunError, match=r"sweep\.adapter\.eval_steps: is missing"):
        resolve_config(data, folder=tmp_path)
    data["defaults"]["eval_steps"] = 2
    assert resolve_config(data, folder=tmp_path).sweep is not None


def test_adapters_and_sweep_exclude_each_other(tiny_base: Path, tmp_path: Path) -> None:
    data = sweep_data(tiny_base, tmp_path) | {"adapters": run_data(tiny_base, tmp_path)["adapters"]}
    with pytest.raises(RunError, match=r"adapters: a sweep makes the run's adapters; remove"):
        resolve_config(data, folder=tmp_path)


def test_a_resolved_sweep_reads_back(tiny_base: Path, tmp_path: Path) -> None:
    data = sweep_data(tiny_base, tmp_path)
    data["sweep"]["adapter"]["init_from"] = "start"
    config = resolve_config(data, folder=tmp_path)
    assert config.sweep is not None
    assert config.sweep.adapter["init_from"] == str(tmp_path / "start")
    assert config.inputs[-2:] == [str(tmp_path / "start"), str(tiny_base)]
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml").model_dump() == config.model_dump()


def _loss(params: dict[str, Any], step: int) -> float:
    return abs(math.log10(params["learning_rate"]) + 3) / step + 0.01 * params["lora.r"]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
@pytest.mark.parametrize("pruner", ["none", "median", "percentile", "successive_halving", "hyperband"])
def test_a_study_goes_on_from_its_state(sampler: str, pruner: str) -> None:
    """With the same proposals and prunings as if it had never been away."""
    kwargs = {"percentile": 30.0} if pruner == "percentile" else {}
    sweep = SweepConfig.model_validate(
        {
            "trials": 24,
            "sampler": sampler,
            "pruner": pruner,
            "pruner_kwargs": kwargs,
            "adapter": {"eval_dataset": "two", "eval_steps": 2},
            "search": SEARCH,
        }
    )
    pruning = sweep.pruner_arguments({"max_steps": 6})
    first = Study(sweep, 3, pruning)
    second: Study | None = None
    pruned = 0
    for number in range(24):
        trial = first.propose()
        if number == 15:  # in the middle of a trial
            second = Study(sweep, 3, pruning, json.loads(json.dumps(first.state())))
        elif second:
            assert second.propose() == trial
        end: Any = "complete"
        for step in (2, 4, 6)[: 3 - number % 3]:  # some trials are shorter than others
            late = first.report(number, step, _loss(trial["params"], step))
            if second:
                assert second.report(number, step, _loss(trial["params"], step)) == late
            if late:
                end = "pruned"
                break
        pruned += end == "pruned"
        value = _loss(trial["params"], 6) if end == "complete" else None
        for study in filter(None, (first, second)):
            study.end(number, end, value)
    assert second is not None
    assert second.state() == first.state()
    assert (pruned > 0) == (pruner != "none")


def test_proposals_come_from_the_space_and_follow_what_was_good() -> None:
    fields = {"trials": 60, "adapter": {"eval_dataset": "two"}, "search": SEARCH}
    study = Study(SweepConfig.model_validate(fields), 1, {})
    params = []
    for number in range(60):
        params.append(study.propose()["params"])
        study.end(number, "complete", _loss(params[-1], 1))
    assert all(1e-5 <= each["learning_rate"] <= 1e-2 and each["lora.r"] in (4, 8, 12, 16) for each in params)
    early = sum(_loss(each, 1) for each in params[:10]) / 10
    late = sum(_loss(each, 1) for each in params[-10:]) / 10
    assert late < 0.75 * early  # random ones stay alike


@pytest.mark.parametrize(
    ("key", "kwargs"),
    [
        ("sampler_kwargs", {"nonsense": 1}),
        ("sampler_kwargs", {"gamma": 0.25, "n_startup_trials": 2}),
        ("sampler_kwargs", {"n_startup_trials": "4"}),
        ("pruner_kwargs", {"nonsense": 1}),
        ("pruner_kwargs", {"n_startup_trials": -1}),
    ],
)
def test_arguments_that_optuna_refuses(key: str, kwargs: dict[str, Any]) -> None:
    fields = {
        "trials": 8,
        "pruner": "median",
        "adapter": {"eval_dataset": "two", "eval_steps": 2},
        "search": SEARCH,
        key: kwargs,
    }
    sweep = SweepConfig.model_validate(fields)
    with pytest.raises(RunError, match=rf"sweep\.{key}: Optuna rejects these"):
        check_arguments(sweep, sweep.pruner_arguments({}))


@pytest.mark.parametrize(
    ("pruner", "adapter", "key"),
    [
        ("hyperband", {"eval_steps": 5}, "max_resource"),
        ("successive_halving", {"eval_steps": 0.1}, "min_resource"),
    ],
)
def test_steps_that_a_pruner_cannot_know(pruner: str, adapter: dict[str, Any], key: str) -> None:
    fields = {"trials": 8, "pruner": pruner, "adapter": adapter, "search": SEARCH}
    sweep = SweepConfig.model_validate(fields)
    with pytest.raises(ValidationError, match="is missing") as caught:
        sweep.pruner_arguments({"max_steps": -1})
    assert caught.value.errors()[0]["loc"] == ("sweep", "pruner_kwargs", key)
    given = SweepConfig.model_validate(fields | {"pruner_kwargs": {key: 7}})
    assert given.pruner_arguments({"max_steps": -1})[key] == 7
    assert sweep.pruner_arguments({"max_steps": 50})["min_resource"] == 5
    epochs = given.model_copy(update={"adapter": {**given.adapter, "num_train_epochs": 2}})
    assert epochs.over({"max_steps": 50}) == {**epochs.adapter, **epochs.search}
