"""The config of a run: defaults, merging, and one clear line for every fault."""

import dataclasses
import math
from pathlib import Path

import pytest
from mlora.config.config_file import dump_config, load_config, resolve_config
from mlora.config.dataset_config import DataFile
from mlora.config.run_config import RunConfig
from mlora.config.training_fields import TrainingFields
from mlora.engine.engine import Engine
from mlora.offload.options import OffloadOptions
from mlora.optim.registry import optimizer_names
from mlora.run.run import train
from mlora.tasks.result import RunResult

from tests.mlora.config.faulty import lines_of, write


def test_defaults_are_those_of_training_arguments() -> None:
    from transformers import TrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    # ours where Transformers leaves the choice to the run, or has no such setting
    own = {"seed", "eval_dataset", "eval_exact_match", "max_length", "assistant_only_loss", "shuffle"}
    own |= {"objective", "early_stopping_patience", "early_stopping_threshold", "load_best_model_at_end"}
    own |= {"init_samples", "loraplus_lr_ratio", "loraplus_lr_embedding", "callbacks"}
    for name, field in TrainingFields.model_fields.items():
        if name not in own:
            default = theirs[name]
            assert field.default == getattr(default, "value", default), name


def test_adapters_take_defaults_and_override_them(tmp_path: Path, base: dict) -> None:
    config = resolve_config(base, folder=tmp_path)
    assert [adapter.learning_rate for adapter in config.adapters] == [1e-3, 5e-4]
    assert [adapter.max_steps for adapter in config.adapters] == [10, 10]
    assert config.adapters[0].weight_decay == 0.0


def test_an_adapters_epochs_win_over_steps_of_the_defaults(tmp_path: Path, base: dict) -> None:
    """In one place max_steps wins, as in TrainingArguments."""
    base["adapters"][0]["num_train_epochs"] = 2
    base["adapters"][1] |= {"num_train_epochs": 2, "max_steps": 7}
    config = resolve_config(base, folder=tmp_path)
    assert [(a.max_steps, a.num_train_epochs) for a in config.adapters] == [(-1, 2.0), (7, 2.0)]
    assert resolve_config(config.model_dump(), folder=tmp_path) == config
    base["defaults"]["num_train_epochs"] = 4
    del base["adapters"][0]["num_train_epochs"]
    assert resolve_config(base, folder=tmp_path).adapters[0].max_steps == 10


def test_paths_resolve_against_the_folder_of_the_file(tmp_path: Path, base: dict) -> None:
    config = load_config(write(tmp_path, base))
    assert config.base_model == str(tmp_path / "model")
    assert config.output_dir == str(tmp_path / "runs" / "one")
    assert config.datasets[0].path == [DataFile(path=str(tmp_path / "d.jsonl"))]


def test_resolved_file_reads_back_to_the_same_config(tmp_path: Path, base: dict) -> None:
    base["adapters"][1]["lr_scheduler_kwargs"] = {"min_lr": 1e-5}
    config = load_config(write(tmp_path, base))
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "config.yaml").write_text(dump_config(config))
    assert load_config(other / "config.yaml") == config


def test_hub_id_stays_as_it_is(tmp_path: Path, base: dict) -> None:
    base["base_model"] = "some-org/some-model"
    assert resolve_config(base, folder=tmp_path).base_model == "some-org/some-model"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("adapters.1.lora.rr", 3, "adapters.b.lora.rr: unknown key; did you mean 'r'?"),
        (
            "adapters.0.learning_rte",
            3,
            "adapters.a.learning_rte: unknown key; did you mean 'learning_rate'?",
        ),
        ("defaults.lr", 3, "defaults.lr: unknown key; did you mean 'learning_rate'?"),
        ("defaults.warmup_step", 3, "defaults.warmup_step: unknown key; did you mean 'warmup_steps'?"),
        (
            "pipeline",
            2,
            "pipeline: must be keys and values (stages, schedule, micro_batches, partition, replicas), got 2",
        ),
        ("outptu_dir", "x", "outptu_dir: unknown key; did you mean 'output_dir'?"),
        ("datasets.0.paht", "x", "datasets.d.paht: unknown key; did you mean 'path'?"),
        (
            "learning_rate",
            1.0,
            "learning_rate: unknown key here; it belongs under defaults or under an adapter",
        ),
        (
            "adapters.0.bf16",
            True,
            "adapters.a.bf16: unknown key here; it belongs at the top level of the config",
        ),
        ("defaults.lora", {}, "defaults.lora: unknown key here; it belongs under an adapter"),
        ("adapters", [], "adapters: must not be empty"),
        ("adapters.0.lora.r", 0, "adapters.a.lora.r: must be at least 1, got 0"),
        ("adapters.0.lora.r", "4", "adapters.a.lora.r: must be a whole number, got '4'"),
        ("adapters.0.lora.r", 2**31, "adapters.a.lora.r: must be below 2147483648, got 2147483648"),
        (
            "adapters.0.lora.rank_pattern",
            {"q_proj": 0},
            "adapters.a.lora.rank_pattern.q_proj: must be at least 1, got 0",
        ),
        ("adapters.0.lora.lora_dropout", 1, "lora.lora_dropout: must be below 1, got 1"),
        ("adapters.0.lora.lora_dropout", -0.1, "lora.lora_dropout: must be at least 0, got -0.1"),
        (
            "adapters.0.lora.target_modules",
            3,
            "lora.target_modules: must be a name, a pattern or a list of names",
        ),
        ("adapters.0.lora.target_modules", "(q", "lora.target_modules: '(q' is not a regular expression:"),
        ("adapters.0.lora.rank_pattern", {"(q": 2}, "rank_pattern.(q: '(q' is not a regular expression:"),
        (
            "adapters.0.lora.inference_mode",
            True,
            "lora.inference_mode: is not a setting of a run; remove this key",
        ),
        ("adapters.0.lora.peft_type", "IA3", "lora.peft_type: is not a setting of a run; remove this key"),
        ("adapters.0.name", "a/b", "adapters[0].name: 'a/b' is not a plain name"),
        ("adapters.0.name", "..", "adapters[0].name: '..' is not a plain name"),
        ("adapters.0.name", "__base__", "adapters.__base__.name: '__base__' is reserved"),
        ("adapters.0.name", "b", "adapters: the name 'b' is used twice"),
        ("adapters.0.name", "B", "adapters: 'B' and 'b' differ by case only"),
        ("defaults.max_steps", 10**9 + 1, "max_steps: must be at most 1000000000, got 10000"),
        ("defaults.num_train_epochs", 1e10, "epochs: must be at most 1000000000"),
        ("adapters.1.warmup_steps", 1e300, "warmup_steps: must be at most 1000000000"),
        ("adapters.1.learning_rate", 1e38, "learning_rate: must be at most 1e+30"),
        ("defaults.gradient_accumulation_steps", 10**12, "steps: must be at most 1000000000"),
        ("adapters.0.lora.lora_alpha", 0, "lora.lora_alpha: must not be 0"),
        ("adapters.0.lora.alpha_pattern", {"q_proj": 0}, "lora.alpha_pattern.q_proj: must not be 0"),
        ("adapters.0.lora", None, "adapters.a: needs lora (PEFT's LoraConfig fields) or init_from"),
        ("adapters.0.dataset", "x", "adapters.a.dataset: no dataset is named 'x'; datasets: d"),
        ("adapters.0.eval_steps", 5, "adapters.a: eval_steps needs an eval_dataset"),
        ("adapters.0.load_best_model_at_end", True, "load_best_model_at_end needs an eval_dataset"),
        ("adapters.0.load_best_model_at_end", "best", "load_best_model_at_end: must be true or false"),
        ("adapters.0.metric_for_best_model", "loss", "metric_for_best_model needs an eval_dataset"),
        ("adapters.0.greater_is_better", True, "greater_is_better needs metric_for_best_model or load_best"),
        ("adapters.0.load_best_model_at_ends", True, "unknown key; did you mean 'load_best_model_at_end'?"),
        ("adapters.0.priority", 0.5, "adapters.a.priority: must be a whole number, got 0.5"),
        ("adapters.0.max_steps", 0, "adapters.a.max_steps: must be at least 1, or -1"),
        ("adapters.0.max_steps", 10**400, "adapters.a.max_steps: must be at most 10000"),
        ("adapters.0.num_train_epochs", 1e300, "num_train_epochs: must be at most 10000"),
        ("adapters.0.num_train_epochs", float("inf"), "num_train_epochs: must be at most"),
        ("defaults.learning_rate", "fast", "defaults.learning_rate: must be a number"),
        ("defaults.learning_rate", float("nan"), "defaults.learning_rate: must be a finite number, got nan"),
        (
            "defaults.optim",
            "best",
            f"defaults.optim: must be one of {', '.join(optimizer_names()[:-1])} "
            f"or {optimizer_names()[-1]}, got 'best'",
        ),
        (
            "defaults.save_steps",
            2.5,
            "defaults.save_steps: must be a whole number of steps, or a ratio below 1",
        ),
        (
            "datasets.0.format",
            "csv",
            "messages, preference, unpaired, classification or question_answering, got 'csv'",
        ),
        (
            "defaults.assistant_only_loss",
            True,
            "adapters.a.assistant_only_loss: needs a dataset of format messages or sharegpt or prompt",
        ),
        (
            "scheduler.policy",
            "best",
            "policy: must be one of fcfs or shortest_first, got 'best'",
        ),
        (
            "scheduler.memory_limit",
            "8 elephants",
            "scheduler.memory_limit: must be a size such as 8GiB or 500MB",
        ),
        ("pipeline.stages", 0, "pipeline.stages: must be at least 1, got 0"),
        ("pipeline.schedule", "pipedream", "pipeline.schedule: must be one of"),
        (
            "pipeline.replicas",
            9,
            "pipeline.replicas: must be at most 2, the number of adapters that train at once, got 9",
        ),
        (
            "pipeline.partition",
            [3, 1],
            "pipeline.partition: must have one number per stage: stages is 1, got 2 numbers; remove it",
        ),
        ("pipeline.partition", [0], "pipeline.partition: each stage needs at least one block, got [0]"),
        ("offload", "disk", "offload: must be keys and values (base, optimizer, activations, folders, host_"),
        ("offload.base", "ssd", "offload.base: must be one of device, host or disk, got 'ssd'"),
        ("offload.slots", 1, "offload.slots: must be at least 2, got 1"),
        ("offload.folders", "scratch", "offload.folders: must be a list of entries that begin with '- '"),
        ("offload.device_memory", "big", "offload.device_memory: must be a size such as 8GiB or 500MB"),
        ("offload.folder", [], "offload.folder: unknown key; did you mean 'folders'?"),
        ("host_memory", "4GiB", "host_memory: unknown key here; it belongs under offload"),
        (
            "offload.optimizer",
            "disk",
            "offload.optimizer: disk serves method: full; adapters'",
        ),
        ("offload.host_memory", "4GiB", "offload.host_memory: bounds what activations: auto may use"),
        ("method", "both", "method: must be one of lora or full, got 'both'"),
        ("base_model", "./nowhere", "base_model: no such folder:"),
        ("base_model", "model/nowhere", "base_model: no such folder:"),
        ("device", "tpu", "device: must be cpu, cuda or cuda:<index>, got 'tpu'"),
    ],
)
def test_every_fault_is_one_line_that_names_its_key(
    tmp_path: Path, base: dict, path: str, value: object, expected: str
) -> None:
    *parents, key = path.split(".")
    node = base
    for part in parents:
        node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
    node[key] = value
    lines = lines_of(tmp_path, base)
    assert len(lines) == 1, lines
    assert expected in lines[0]
    assert lines[0].startswith("run.yaml: ")


def test_two_precisions_are_refused(tmp_path: Path, base: dict) -> None:
    assert lines_of(tmp_path, {**base, "bf16": True, "fp16": True}) == [
        "run.yaml: bf16 and fp16 are both true; choose one"
    ]


def test_an_offloaded_base_is_not_packed(tmp_path: Path, base: dict) -> None:
    base |= {"pack_base": True, "offload": {"base": "disk"}}
    assert lines_of(tmp_path, base) == [
        "run.yaml: pack_base: keeps the base in memory, but offload.base is disk; remove one of them"
    ]
    base["offload"] = {"base": "host"}
    assert resolve_config(base, folder=tmp_path).offload.options == OffloadOptions(base="host")


def test_a_gpu_keeps_everything_on_the_device(tmp_path: Path, base: dict) -> None:
    for key in ("base", "optimizer"):
        found = lines_of(tmp_path, {**base, "device": "cuda:1", "offload": {key: "host"}})
        assert found == [f"run.yaml: offload.{key}: host serves the CPU so far, got device cuda:1"]


def test_folders_resolve_against_the_folder_of_the_file(tmp_path: Path, base: dict) -> None:
    base["offload"] = {"base": "disk", "folders": ["one", "/two"], "slots": 4}
    options = load_config(write(tmp_path, base)).offload.options
    assert options == OffloadOptions(base="disk", folders=(str(tmp_path / "one"), "/two"), slots=4)


def test_missing_keys_are_named(tmp_path: Path, base: dict) -> None:
    del base["output_dir"], base["adapters"][0]["dataset"]
    assert lines_of(tmp_path, base) == [
        "run.yaml: output_dir: is missing",
        "run.yaml: adapters.a.dataset: is missing",
    ]


def test_exact_match_needs_prompts(tmp_path: Path, base: dict) -> None:
    base["adapters"][0] |= {"eval_dataset": "d", "eval_exact_match": True}
    assert (
        "adapters.a.eval_exact_match: needs an eval_dataset of format prompt_completion"
        in lines_of(tmp_path, base)[0]
    )


def test_numbers_beyond_a_float_are_refused(tmp_path: Path, base: dict) -> None:
    base["scheduler"] = {"memory_limit": 10**400}
    base["adapters"][0]["lora"]["lora_alpha"] = 10**400
    found = lines_of(tmp_path, base)
    assert [line.partition(" must be ")[0] for line in found] == [
        "run.yaml: adapters.a.lora.lora_alpha:",
        "run.yaml: scheduler.memory_limit:",
    ]


@pytest.mark.parametrize("limit", [True, [1], {}, 0, 0.5, -1.5, math.inf, ".inf", "0.5", "8XB"])
def test_what_is_no_size_is_one_line(tmp_path: Path, base: dict, limit: object) -> None:
    base["scheduler"] = {"memory_limit": limit}
    expected = f"run.yaml: scheduler.memory_limit: must be a size such as 8GiB or 500MB, got {limit!r}"
    assert lines_of(tmp_path, base) == [expected]


def test_public_names() -> None:
    import mlora

    assert {mlora.RunConfig, mlora.RunResult, mlora.Engine} == {RunConfig, RunResult, Engine}
    assert mlora.train is train
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = mlora.trian


def test_config_is_frozen(tmp_path: Path, base: dict) -> None:
    config = resolve_config(base, folder=tmp_path)
    assert isinstance(config, RunConfig)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_every_field_of_peft_is_known() -> None:
    from mlora.config.lora_fields import LoraFields
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig) if field.init}
    assert fields <= LoraFields.model_fields.keys()
