"""The JSON schema of a run's YAML: it accepts what the reader accepts, and refuses misspelt keys."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from mlora.config.config_file import dump_config, load_config
from mlora.config.schema import run_schema, submission_schema
from mlora.config.yaml_file import read_yaml

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("*.yaml"))
RUN, TASK = Draft202012Validator(run_schema()), Draft202012Validator(submission_schema())


def faults(validator: Draft202012Validator, data: Any) -> list[str]:
    """Returns where a schema refuses data."""
    return [error.json_path for error in validator.iter_errors(data)]


def test_schemas_are_of_their_dialect() -> None:
    for validator in (RUN, TASK):
        Draft202012Validator.check_schema(validator.schema)
        assert validator.schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path: Path) -> None:
    assert faults(RUN, read_yaml(path)) == []


def test_a_resolved_config_is_valid() -> None:
    names = ("quickstart.yaml", "preferences.yaml", "sweep.yaml")
    for path in [path for path in EXAMPLES if path.name in names]:
        assert faults(RUN, yaml.safe_load(dump_config(load_config(path)))) == []


REFUSED = [
    ({"seeed": 1}, "$"),
    ({"device": "gpu"}, "$.device"),
    ({"defaults": {"learning_rat": 1e-3}}, "$.defaults"),
    ({"defaults": {"lr_scheduler_type": "cosin"}}, "$.defaults.lr_scheduler_type"),
    ({"defaults": {"optim": "adam"}}, "$.defaults.optim"),
    ({"defaults": {"max_length": 1}}, "$.defaults.max_length"),
    ({"defaults": {"objective": "dpoo"}}, "$.defaults.objective"),
    ({"defaults": {"objective": {"name": "dpo", "betta": 1.0}}}, "$.defaults.objective"),
    ({"scheduler": {"memory_limit": "8 gigs"}}, "$.scheduler.memory_limit"),
    ({"scheduler": {"memory_limits": "8GiB"}}, "$.scheduler"),
    ({"pipeline": {"schedule": "gpip"}}, "$.pipeline.schedule"),
    ({"report_to": "wandbb"}, "$.report_to"),
    ({"offload": {"base": "disc"}}, "$.offload.base"),
    ({"quantization": {"method": "nf4"}}, "$.quantization"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"scheduler": {"memory_limit": "8GiB"}},
    {"scheduler": {"memory_limit": 8_000_000_000}},
    {"scheduler": {"memory_limit": "500 MB"}},
    {"device": "cuda:1"},
    {"report_to": "wandb"},
    {"report_to": ["wandb", "mlflow"]},
    {"device": None},
    {"defaults": {"objective": {"name": "dpo", "beta": 0.2, "reference": "init_from"}}},
    {"defaults": {"objective": "my_losses:margin"}},
    {"defaults": {"objective": {"name": "my_losses:margin", "takes": "pairs", "margin": 0.5}}},
    {"defaults": {"save_steps": None, "eval_steps": 0.1, "lr_scheduler_kwargs": {"num_cycles": 2}}},
    {"quantization": {"method": "bnb-nf4", "double_quant": True}},
]


def run_with(**more: Any) -> dict[str, Any]:
    """Returns the smallest run, with more keys."""
    return {
        "base_model": "model",
        "output_dir": "runs/one",
        "datasets": [{"name": "d", "path": "d.jsonl", "format": "text"}],
        "adapters": [{"name": "a", "dataset": "d", "lora": {"r": 4}}],
        **more,
    }


@pytest.mark.parametrize(("more", "where"), REFUSED)
def test_mistakes_are_refused_where_they_stand(more: dict[str, Any], where: str) -> None:
    assert faults(RUN, run_with()) == []
    assert faults(RUN, run_with(**more)) == [where]


@pytest.mark.parametrize("more", ACCEPTED)
def test_alternatives_of_the_reader_are_accepted(more: dict[str, Any]) -> None:
    assert faults(RUN, run_with(**more)) == []


LORA = [
    ({"target_modules": "all-linear"}, True),
    ({"target_modules": ["q_proj", "v_proj"]}, True),
    ({"target_modules": 3}, False),
    ({"init_lora_weights": "pissa_niter_4"}, True),
    ({"init_lora_weights": False}, True),
    ({"init_lora_weights": "pisa"}, False),
    ({"peft_type": "LORA", "use_qalora": False, "eva_config": None}, True),
    ({"rank": 8}, False),
    ({"r": 0}, False),
]


@pytest.mark.parametrize(("lora", "valid"), LORA)
def test_the_lora_block(lora: dict[str, Any], valid: bool) -> None:
    adapters = [{"name": "a", "dataset": "d", "lora": lora}]
    assert faults(RUN, run_with(adapters=adapters)) == ([] if valid else ["$.adapters[0].lora"])


SEARCHES = [
    ({"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}, True),
    ({"lora": {"r": {"choice": [2, 4]}, "target_modules": {"choice": ["all-linear", ["q_proj"]]}}}, True),
    ({"lora": {"choice": [{"r": 2}, {"r": 4}]}}, True),
    ({"objective": {"beta": {"low": 0.05, "high": 0.5}}}, True),
    ({"learning_rat": {"choice": [1e-3]}}, False),
    ({"learning_rate": {"lo": 1e-4, "high": 1e-2}}, False),
    ({"learning_rate": {"choice": ["fast"]}}, False),
    ({"lora": {"rank": {"choice": [2]}}}, False),
    ({}, False),
]


@pytest.mark.parametrize(("search", "valid"), SEARCHES)
def test_a_sweep_stands_in_place_of_adapters(search: dict[str, Any], valid: bool) -> None:
    run = run_with(sweep={"trials": 2, "adapter": {"dataset": "d"}, "search": search})
    del run["adapters"]
    assert (faults(RUN, run) == []) == valid
    del run["sweep"]
    assert faults(RUN, run) == ["$"]


def test_a_task_has_an_adapters_keys_and_datasets() -> None:
    task = {"name": "a", "dataset": "d", "priority": 1, "lora": {"r": 4}}
    assert faults(TASK, {**task, "datasets": [{"name": "d", "path": "d.jsonl", "format": "text"}]}) == []
    assert faults(TASK, {**task, "datasets": [{"name": "d", "file": "d.jsonl", "format": "text"}]})
    assert faults(TASK, {**task, "prioritty": 1}) == ["$"]
    assert faults(TASK, {"dataset": "d"}) == ["$"]
    assert faults(RUN, task)
