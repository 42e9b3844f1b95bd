"""Which evaluation counts as the best one."""

from pathlib import Path

import pytest
import yaml
from mlora.config.adapter_config import BestRule
from mlora.config.config_file import dump_config, resolve_config
from mlora.errors import RunError
from mlora.objectives.registry import takes

from tests.mlora.config.faulty import lines_of


def lacking(folder: Path, base: dict, **fields: object) -> list[str]:
    """The lines that refuse an adapter that has an `eval_dataset`, and these fields."""
    return lines_of(folder, base | {"adapters": [base["adapters"][0] | {"eval_dataset": "d", **fields}]})


RULES: list[tuple[dict, BestRule | None]] = [
    ({}, None),
    ({"load_best_model_at_end": False}, None),
    ({"load_best_model_at_end": True}, BestRule("eval_loss", False, True)),
    ({"metric_for_best_model": "loss"}, BestRule("eval_loss", False, False)),
    ({"load_best_model_at_end": True, "greater_is_better": True}, BestRule("eval_loss", True, True)),
    ({"metric_for_best_model": "eval_exact_match"}, BestRule("eval_exact_match", True, False)),
    (
        {"load_best_model_at_end": True, "metric_for_best_model": "exact_match", "greater_is_better": False},
        BestRule("eval_exact_match", False, True),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), RULES)
def test_the_best_is_that_of_training_arguments(
    tmp_path: Path, base: dict, fields: dict, expected: BestRule | None
) -> None:
    from transformers import TrainingArguments

    base["datasets"][0]["format"] = "prompt_completion"
    base["adapters"][0] |= {"eval_dataset": "d", "eval_steps": 5, "eval_exact_match": True, **fields}
    rule = resolve_config(base, folder=tmp_path).adapters[0].best_rule
    assert rule == expected
    steps = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5}
    theirs = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **steps, **fields)
    assert theirs.load_best_model_at_end == (rule is not None and rule.loads)
    assert theirs.greater_is_better == (rule.greater if rule else None)
    metric = theirs.metric_for_best_model
    assert (metric and f"eval_{metric.removeprefix('eval_')}") == (rule.metric if rule else None)


def test_with_early_stopping_the_best_is_loaded(tmp_path: Path, base: dict) -> None:
    base["adapters"][0] |= {"eval_dataset": "d", "eval_steps": 5, "early_stopping_patience": 2}
    config = resolve_config(base, folder=tmp_path)
    assert config.adapters[0].best_rule == BestRule("eval_loss", False, True)
    assert resolve_config(yaml.safe_load(dump_config(config))).adapters[0] == config.adapters[0]
    base["defaults"]["load_best_model_at_end"] = False
    config = resolve_config(base, folder=tmp_path)
    assert config.adapters[0].best_rule == BestRule("eval_loss", False, False)


def test_the_best_needs_evaluations(tmp_path: Path, base: dict) -> None:
    for key, value in (("load_best_model_at_end", True), ("metric_for_best_model", "loss")):
        assert lacking(tmp_path, base, **{key: value}) == [f"run.yaml: adapters.a: {key} needs eval_steps"]
    assert lacking(tmp_path, base, eval_steps=5, metric_for_best_model="exact_match") == [
        "run.yaml: adapters.a: metric_for_best_model: exact_match needs eval_exact_match: true"
    ]


@pytest.mark.parametrize(
    ("own", "applied"),
    [
        ({"eval_dataset": "d"}, (5, 2, 0.1, True)),
        ({}, (None, None, 0.0, None)),
        ({"eval_dataset": "d", "eval_steps": None}, (None, None, 0.0, None)),
        ({"eval_dataset": "d", "early_stopping_patience": None}, (5, None, 0.0, True)),
        ({"eval_dataset": None, "learning_rate": 1e-3}, (None, None, 0.0, None)),
    ],
)
def test_defaults_that_have_nothing_to_act_on_do_not_apply(
    tmp_path: Path, base: dict, own: dict, applied: tuple
) -> None:
    keys = ("eval_steps", "early_stopping_patience", "early_stopping_threshold", "load_best_model_at_end")
    base["defaults"] |= dict(zip(keys, (5, 2, 0.1, True), strict=True))
    base["adapters"][0] |= own
    config = resolve_config(base, folder=tmp_path)
    assert tuple(getattr(config.adapters[0], key) for key in keys) == applied
    assert resolve_config(yaml.safe_load(dump_config(config))) == config


def test_own_fields_that_have_nothing_to_act_on_are_refused(tmp_path: Path, base: dict) -> None:
    base["defaults"]["eval_steps"] = 5
    base["adapters"][0]["early_stopping_patience"] = 2
    with pytest.raises(
        RunError, match=r"^config: adapters\.a: early_stopping_patience needs an eval_dataset$"
    ):
        resolve_config(base, folder=tmp_path)


@pytest.mark.parametrize(
    ("objective", "name", "greater"),
    [
        ("cross_entropy", "accuracy", True),
        ("dpo", "rewards/accuracies", True),
        ("simpo", "eval_rewards/margins", True),
        ("orpo", "nll_loss", False),
        ("kto", "rewards/margins", True),
        ("losses:own", "eval_spread", True),
    ],
)
def test_an_objectives_metrics_can_decide(
    tmp_path: Path, base: dict, monkeypatch: pytest.MonkeyPatch, objective: str, name: str, greater: bool
) -> None:
    from transformers import TrainingArguments

    (tmp_path / "losses.py").write_text("def own(rows): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    base["datasets"][0]["format"] = {"sequences": "tokens", "pairs": "preference", "judged": "unpaired"}[
        takes(objective)
    ]
    fields = {"eval_dataset": "d", "eval_steps": 5, "objective": objective, "metric_for_best_model": name}
    base["adapters"] = [base["adapters"][0] | fields]
    rule = resolve_config(base, folder=tmp_path).adapters[0].best_rule
    assert rule == BestRule(f"eval_{name.removeprefix('eval_')}", greater, False)
    steps = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "load_best_model_at_end": True}
    theirs = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, metric_for_best_model=name, **steps)
    assert theirs.greater_is_better == rule.greater


@pytest.mark.parametrize(
    ("objective", "name", "expected"),
    [
        (
            "cross_entropy",
            "bleu",
            "'bleu' is not measured with objective cross_entropy; metrics: loss, accuracy (of a classifier), "
            "exact_match (needs eval_exact_match: true)",
        ),
        ("cross_entropy", "eval_acuracy", "with objective cross_entropy; did you mean 'accuracy'?"),
        ("cross_entropy", "rewards/margins", "with objective cross_entropy; metrics: loss,"),
        ("dpo", "reward/accuracies", "with objective dpo; did you mean 'rewards/accuracies'?"),
        ("dpo", "eval_tokens", "with objective dpo; metrics: loss, rewards/accuracies,"),
        ("kto", "rewards/accuracies", "'rewards/accuracies' is not measured with objective kto;"),
    ],
)
def test_a_metric_that_is_not_measured(
    tmp_path: Path, base: dict, objective: str, name: str, expected: str
) -> None:
    format = {"sequences": "tokens", "pairs": "preference", "judged": "unpaired"}[takes(objective)]
    base["datasets"][0]["format"] = format
    base["defaults"] |= {
        "eval_dataset": "d",
        "eval_steps": 5,
        "objective": objective,
        "metric_for_best_model": name,
    }
    (line,) = lines_of(tmp_path, base)  # both adapters have it of the defaults
    assert line.startswith("run.yaml: adapters.a.metric_for_best_model: ")
    assert expected in line
