"""Mistakes in a config, and what is said about each: one line, with the key, what was expected, what came."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from mlora.config.adapter_config import AdapterConfig
from mlora.config.aliases import other_tools
from mlora.config.config_file import load_config
from mlora.config.dataset_config import DatasetConfig
from mlora.config.faults import unknown_key
from mlora.config.lora_fields import CHOICES
from mlora.config.run_config import RunConfig
from mlora.config.search_space import LEAF_KEYS
from mlora.config.sections import PipelineConfig, QuantizationConfig, SchedulerConfig
from mlora.config.sweep_config import SweepConfig
from mlora.config.training_fields import TrainingFields
from mlora.errors import RunError
from transformers import TrainingArguments

Faults = Callable[..., list[str]]
RUN = """\
base_model: model
output_dir: runs/one
defaults: {max_steps: 10}
datasets:
- {name: d, path: d.jsonl, format: tokens}
adapters:
- {name: a, dataset: d, lora: {r: 4}}
- {name: b, dataset: d, lora: {r: 7, target_modules: [q_proj]}}
"""
SWEEP = (
    RUN[: RUN.index("adapters:")]
    + """\
sweep:
  trials: 3
  adapter: {dataset: d, eval_dataset: d, lora: {r: 4}}
  search: {learning_rate: {low: 1e-5, high: 1e-3}}
"""
)


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """What is said of a config's text, or of overrides of one without a fault; without the file's folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "d.jsonl").write_text("")

    def read(text: str | bytes = RUN, *overrides: str) -> list[str]:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(RunError) as error:
            load_config(path, overrides)
        return str(error.value).replace(f"{tmp_path}/", "").splitlines()

    return read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml: must hold keys such as base_model and adapters, got nothing"),
        ("hello", "run.yaml: must hold keys such as base_model and adapters, got a single value"),
        ("- a\n- b\n", "run.yaml: must hold keys such as base_model and adapters, got a list"),
        ("base_model:x\nseed:3\n", "'base_model:x seed:3'; write a space after each ':'"),
        ("adapters:\n\t- a\n", "run.yaml:2: YAML is indented with spaces; replace the tab with spaces"),
        (bytes(range(200)), "run.yaml: is not text in UTF-8 (byte 128); expected a YAML file"),
        (RUN.encode("utf-16"), "run.yaml: is not text in UTF-8 (byte 0)"),
        ("base_model: mod\xe8le\n".encode("latin-1"), "run.yaml: is not text in UTF-8 (byte 15)"),
        ("a: 1\nb: \0", "run.yaml:2: holds the character #x0000, which YAML does not allow"),
        (RUN + "---\na: 1\n", "run.yaml:9: '---' begins a second document; write one document in a file"),
        ('a: 1\nbase_model: "x\n', "run.yaml:2: a quote that opens here is not closed"),
        ("base_model: a: b\n", "run.yaml:1: a ':' is not expected here; check the indentation and"),
        ("base_model model\nseed: 3\n", "run.yaml:2: a ':' is not expected here"),
        ("base_model: x\n  seed: 3\n", "run.yaml:2: a ':' is not expected here"),
        ("a: 1\n b: 2\n", "run.yaml:2: a ':' is not expected here"),
        ("a:\n  b: 1\n c: 2\n", "run.yaml:3: is not indented like the lines before it"),
        ("a: 1\nb\nc: 2\n", "run.yaml:3: this key has no ':'"),
        ("a: [1, 2\n", "run.yaml:2: expected ',' or ']', but got the end"),
        ("a: `x`\n", "run.yaml:1: a value cannot begin with `; put it in quotes"),
        ("a: @x\n", "run.yaml:1: a value cannot begin with @; put it in quotes"),
        ("%foo\na: 1\n", "run.yaml:2: expected '---' after a line that begins with %"),
        ("? [a, b]\n: 4\n", "run.yaml:1: a key must be text, not a list or a mapping"),
        ("a: !foo x\n", "run.yaml:1: the tag !foo is not known; put the value in quotes if it is text"),
        ("a: *x\n", "run.yaml:1: *x has no anchor &x; put it in quotes if it is text"),
        ("a: =\n", "run.yaml:1: = cannot be read; put it in quotes"),
        (RUN + "seed: 010\n", "run.yaml:9: YAML reads 010 as 8; write 8, or put it in quotes if it is text"),
        (RUN + "seed: 1:30\n", "run.yaml:9: YAML reads 1:30 as 90; write 90, or put it in quotes"),
        (RUN + "3: 4\n", "run.yaml: [3]: a key must be text, got 3; put it in quotes"),
        (RUN + "on: 1\n", "a key must be text, got true; put it in quotes"),
        (RUN + "~: 1\n", "a key must be text, got nothing; put it in quotes"),
        (RUN.replace("{r: 4}", "{1: 4}"), "adapters.a.lora[1]: a key must be text, got 1"),
    ],
)
def test_what_is_no_config_says_where_and_why(faults: Faults, text: str | bytes, expected: str) -> None:
    (line,) = faults(text)
    assert expected in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("base_model=", "base_model: must be text, got nothing"),
        ("base_model=''", "base_model: must not be empty"),
        ("base_model=[1]", "base_model: must be text, got [1]"),
        (
            "base_model=https://x.org/a/b",
            "https://x.org/a/b is a web address; expected a folder or a model's",
        ),
        ("base_model=" + "x" * 300, "cannot be reached: File name too long"),
        ('output_dir="a\\0b"', r"output_dir: 'a\x00b' is not a path: it holds a NUL character"),
        ("seed=", "seed: must be a whole number, got nothing"),
        ("seed=many", "seed: must be a whole number, got 'many'"),
        ("seed=3.5", "seed: must be a whole number, got 3.5"),
        ("seed=true", "seed: must be a number, got true"),
        ("seed=-1", "seed: must be at least 0, got -1"),
        ("seed=1" + "0" * 30, "seed: must be below 9223372036854775808, got 1000"),
        ("seed=" + "x" * 500, "seed: must be a whole number, got '" + "x" * 58 + "…"),
        ("save_total_limit=true", "save_total_limit: must be a number, got true"),
        ("bf16=maybe", "bf16: must be true or false, got 'maybe'"),
        ("bf16=", "bf16: must be true or false, got nothing"),
        ("defaults=", "defaults: must be keys and values (per_device_train_batch_size, "),
        ("defaults=", ", got nothing"),
        ("defaults.learning_rate=yes", "defaults.learning_rate: must be a number, got true"),
        ("defaults.learning_rate={}", "defaults.learning_rate: must be a number, got {}"),
        ("defaults.adam_beta1=1", "defaults.adam_beta1: must be below 1, got 1"),
        ("defaults.num_train_epochs=0", "defaults.num_train_epochs: must be above 0, got 0"),
        ("datasets=", "datasets: must be a list of entries that begin with '- ', got nothing"),
        ("datasets={a: 1}", "datasets: must be a list of entries that begin with '- ', got {'a': 1}"),
        ("datasets=[]", "datasets: must not be empty"),
        (
            "datasets[0]=d.jsonl",
            "datasets[0]: must be keys and values (name, path, format, split, subset, …), got 'd.jsonl'",
        ),
        ("datasets.d.path=s3://x/y.jsonl", "s3://x/y.jsonl is a web address; download the file and give its"),
        ("adapters=", "adapters: must be a list of entries that begin with '- ', got nothing"),
        ("adapters.a=1", "adapters[0]: must be keys and values (name, dataset, lora, "),
        ("adapters.a.name=3", "adapters[0].name: must be text, got 3"),
        (
            "adapters.a.dataset=x2",
            "dataset=x2: adapters.a.dataset: no dataset is named 'x2'; datasets: d",
        ),
        ("adapters.a.dataset=dd", "adapters.a.dataset: no dataset is named 'dd'; did you mean 'd'?"),
        ("adapters.a.lora=r=8", "adapters.a.lora: must be keys and values, got 'r=8'"),
        ("adapters.a.lora.r=", "adapters.a.lora.r: must be a whole number, got nothing"),
        ("adapters.a.lora.use_dora=", "lora.use_dora: must be true or false, got nothing"),
        ("adapters.a.lora.lora_alpha='8'", "lora.lora_alpha: must be a number, got '8'"),
        (
            "adapters.a.lora.target_modules=q_proj, v_proj",
            "lora.target_modules: 'q_proj, v_proj' is one pattern; did you mean [q_proj, v_proj]?",
        ),
        ("pipeline.stages=true", "pipeline.stages: must be a number, got true"),
        ("adapters..a=1", "--set adapters..a=1: must be key=value, for example --set defaults.max_steps=20"),
        (".=1", "--set .=1: must be key=value"),
        ("seed={a", "--set seed={a: '{a' is not YAML: expected ',' or '}', but got the end"),
        ("seed==", "'=' is not YAML: = cannot be read; put it in quotes"),
        ("lora.r=4", "--set lora.r=4: lora: unknown key here; it belongs under an adapter"),
        ("adapters[x].lora=1", "--set adapters[x].lora=1: adapters[x]: unknown key"),
        ("adapters.a.lora.r.x=1", "adapters[0].lora.r is 4 and has no key 'x'"),
    ],
)
def test_wrong_values_say_what_was_expected_and_what_came(
    faults: Faults, override: str, expected: str
) -> None:
    (line,) = faults(RUN, override)
    assert expected in line


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        ("defaults.optim=adamww", "adamw_torch"),
        ("defaults.optim=adamw", "adamw_torch"),
        ("defaults.optim=SGD", "sgd"),
        ("defaults.lr_scheduler_type=lineer", "linear"),
        ("defaults.objective=dpoo", "dpo"),
        ("datasets.d.format=token", "tokens"),
        ("datasets.d.format=chatml", "messages"),
        ("datasets.d.format=dpo", "preference"),
        ("datasets.d.format=kto", "unpaired"),
        ("scheduler.policy=fcf", "fcfs"),
        ("pipeline.schedule=gpip", "gpipe"),
        ("quantization.method=bnb_nf4", "bnb-nf4"),
        ("adapters.a.lora.init_lora_weights=pisa", "pissa"),
        ("adapters.a.lora.init_lora_weights=gausian", "gaussian"),
        ("adapters.a.lora.task_type=seq_cls", "SEQ_CLS"),
        ("adapters.a.lora.bias=nonee", "none"),
    ],
)
def test_a_misspelt_value_leads_to_the_nearest(faults: Faults, value: str, nearest: str) -> None:
    (line,) = faults(RUN, value)
    wrong = value.partition("=")[2]
    assert line.startswith(f"--set {value}: ")
    assert line.endswith(f": {wrong!r} is unknown; did you mean {nearest!r}?")


@pytest.mark.parametrize("value", ["PiSSA", "pissa_niter_4", "LoRA_GA", "true", "false"])
def test_initialisations_are_known_in_any_case(tmp_path: Path, value: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "run.yaml").write_text(RUN)
    config = load_config(tmp_path / "run.yaml", [f"adapters.a.lora.init_lora_weights={value}"])
    adapter = config.adapters[0]
    assert adapter.lora is not None
    given = adapter.lora["init_lora_weights"]
    assert str(given).lower() == value.lower()


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("defaults.lr", "did you mean 'learning_rate'?"),
        ("adapters.a.lr", "did you mean 'learning_rate'?"),
        ("lr", "did you mean 'learning_rate'? It belongs under defaults or under an adapter"),
        ("adapters.a.rank", "did you mean 'r'? It belongs under an adapter's lora"),
        ("adapters.a.alpha", "did you mean 'lora_alpha'? It belongs under an adapter's lora"),
        ("adapters.a.dropout", "did you mean 'lora_dropout'? It belongs under an adapter's lora"),
        ("adapters.a.lora.alpha", "did you mean 'lora_alpha'?"),
        ("adapters.a.lora.targets", "did you mean 'target_modules'?"),
        ("adapters.a.r", "unknown key here; it belongs under an adapter's lora"),
        ("adapters.a.lora.learning_rate", "unknown key here; it belongs under defaults or under an adapter"),
        ("adapters.a.data", "did you mean 'dataset'?"),
        ("adapters.a.batch_size", "did you mean 'per_device_train_batch_size'?"),
        ("defaults.micro_batch_size", "did you mean 'per_device_train_batch_size'?"),
        ("defaults.eval_batch_size", "did you mean 'per_device_eval_batch_size'?"),
        ("defaults.epochs", "did you mean 'num_train_epochs'?"),
        ("defaults.seq_len", "did you mean 'max_length'?"),
        ("defaults.max_seq_length", "did you mean 'max_length'?"),
        ("defaults.cutoff_len", "did you mean 'max_length'?"),
        ("defaults.grad_accum", "did you mean 'gradient_accumulation_steps'?"),
        ("defaults.grad-accum-steps", "did you mean 'gradient_accumulation_steps'?"),
        ("defaults.warmup", "did you mean 'warmup_steps'?"),
        ("defaults.Warmup_Ratio", "did you mean 'warmup_steps'?"),
        ("defaults.warmup_ratio", "did you mean 'warmup_steps'? A number below 1 is a ratio"),
        ("load_in_4bit", "write `quantization: {method: bnb-nf4}` at the top level"),
        ("defaults.load_in_8bit", "write `quantization: {method: bnb-int8}` at the top level"),
        ("defaults.steps", "did you mean 'max_steps'?"),
        ("defaults.optimizer", "did you mean 'optim'?"),
        ("defaults.wd", "did you mean 'weight_decay'?"),
        ("defaults.patience", "did you mean 'early_stopping_patience'?"),
        ("defaults.gradient_clipping", "did you mean 'max_grad_norm'?"),
        ("gradient_clipping", "did you mean 'max_grad_norm'? It belongs under defaults or under an adapter"),
        ("model", "did you mean 'base_model'?"),
        ("model_name_or_path", "did you mean 'base_model'?"),
        ("output", "did you mean 'output_dir'?"),
        ("data", "did you mean 'datasets'?"),
        ("datasets.d.file", "did you mean 'path'?"),
        ("datasets.d.type", "did you mean 'format'?"),
        ("datasets.d.field_messages", "did you mean 'columns'?"),
        ("defaults.dataset_text_field", "did you mean 'columns'? It belongs under datasets"),
        ("datasets.d.train_on_split", "did you mean 'split'?"),
        ("datasets.d.ranking", "did you mean 'format'?"),
        ("datasets.d.ds_type", "a file's content tells what kind of file it is; remove this key"),
        ("datasets.d.weight", "it stands beside one of several paths: path: [one.jsonl, {path: two.jsonl"),
        ("datasets.d.roles_to_train", "did you mean 'assistant_only_loss'? It belongs under defaults"),
        ("dataset_prepared_path", "did you mean 'data_cache'?"),
        ("pipeline.num_stages", "did you mean 'stages'?"),
        ("scheduler.memory", "did you mean 'memory_limit'?"),
        ("memory_limit", "unknown key here; it belongs under scheduler"),
        ("stages", "unknown key here; it belongs under pipeline"),
        ("defaults.eval_file", "did you mean 'eval_dataset'?"),
        ("adapters.a.val_set_size", "did you mean 'validation_split'? It belongs under datasets"),
        ("adapters.a.train_path", "did you mean 'dataset'?"),
        ("defaults.save_best", "did you mean 'load_best_model_at_end'?"),
        ("defaults.early_stopping_min_delta", "did you mean 'early_stopping_threshold'?"),
        ("defaults.eval_strategy", "did you mean 'eval_steps'?"),
        ("defaults.packing", "unknown key; samples are always packed, without padding; remove this key"),
        ("adapters.a.packing", "unknown key; samples are always packed, without padding; remove this key"),
        ("defaults.sample_packing", "unknown key; samples are always packed, without padding"),
        ("defaults.group_by_length", "unknown key; samples are always packed, without padding"),
        ("packing", "unknown key; samples are always packed, without padding; remove this key"),
        ("adapters.a.completion_only_loss", "completions are always trained without their prompts; remove"),
        ("defaults.train_on_inputs", "or use format text"),
        ("adapter", "unknown key; list adapters under adapters, each with its lora"),
        ("attn_implementation", "unknown key; the run has its own attention over packed rows; remove"),
        ("lora_target_linear", "unknown key; write target_modules: all-linear in the adapter's lora"),
        ("deepspeed", "unknown key; remove this key; `mlora train --stages N` cuts the model"),
        (
            "resume_from_checkpoint",
            "unknown key; remove this key, and continue the run with `mlora resume RUN_DIR`",
        ),
        ("trust_remote_code", "unknown key; it is not supported; base models are Transformers' own"),
        ("chat_template", "unknown key here; it belongs under datasets"),
        ("dtype", "write `bf16: true` or `fp16: true` at the top level of the config"),
        ("torch_dtype", "write `bf16: true` or `fp16: true` at the top level of the config"),
        ("special_tokens", "save the tokenizer with them in the base model's folder"),
        ("placement", "unknown key here; it belongs under scheduler"),
        ("defaults.scheduler", "unknown key; did you mean 'lr_scheduler_type'?"),
        ("adapters.a.scheduler", "unknown key; did you mean 'lr_scheduler_type'?"),
        ("adapters.a.beta", "it belongs in objective: {name: dpo, beta: 1} (also cpo, simpo, orpo, kto)"),
        ("defaults.desirable_weight", "it belongs in objective: {name: kto, desirable_weight: 1}"),
        ("simpo_gamma", "it belongs in objective: {name: cpo, simpo_gamma: 1} (also simpo)"),
        ("defaults.dtype", "unknown key; write `bf16: true` or `fp16: true` at the top level"),
        ("save", "unknown key; known keys: base_model, output_dir,"),
        ("peft_use_dora", "did you mean 'use_dora'? It belongs under an adapter's lora"),
        ("rl", "did you mean 'objective'? It belongs under defaults or under an adapter"),
        ("rl_beta", "it belongs in objective: {name: dpo, beta: 1} (also cpo, simpo, orpo, kto)"),
        ("pref_beta", "it belongs in objective: {name: dpo, beta: 1}"),
        ("defaults.kto_chosen_weight", "it belongs in objective: {name: kto, desirable_weight: 1}"),
        ("orpo_alpha", "it is beta of objective: {name: orpo, beta: ...}"),
        ("flash_attention", "unknown key; the run has its own attention over packed rows; remove"),
        ("pad_to_sequence_len", "samples are always packed, without padding; remove this key"),
        ("evals_per_epoch", "write eval_steps; below 1 it is a share of all steps"),
        ("stage", "the loss is an adapter's objective, such as dpo"),
        ("finetuning_type", "did you mean 'method'?"),
        ("template", "did you mean 'chat_template'? It belongs under datasets"),
        ("adapter_name_or_path", "did you mean 'init_from'? It belongs under an adapter"),
        ("additional_target", "did you mean 'modules_to_save'? It belongs under an adapter's lora"),
        ("overwrite_output_dir", "remove this key, and use `mlora train --overwrite`"),
        ("do_train", "the command says what is done"),
        ("datasets.d.dataset_name", "did you mean 'path'?"),
        ("dataset_test_split", "add an entry of datasets with split: test, and name it as eval_dataset"),
        ("use_bnb_nested_quant", "did you mean 'double_quant'? It belongs under quantization"),
        ("model_revision", "download that revision of the base model, and name its folder"),
        ("push_to_hub", "upload its folder with `hf upload`"),
    ],
)
def test_names_of_other_tools_lead_to_ours(faults: Faults, key: str, expected: str) -> None:
    (line,) = faults(RUN, f"{key}=1")
    assert line.startswith("--set ")
    assert expected in line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "objective=grpo",
            "objective: 'grpo' is not supported: it trains on what the model generates meanwhile",
        ),
        ("objective=Online-DPO", "objective: 'Online-DPO' is not supported: it trains on what the model"),
        ("objective={name: PPO}", "objectives of preferences are dpo, cpo, simpo, orpo, kto"),
        (
            "objective={name: dpo, reference_free: true}",
            "objective.reference_free: unknown option of dpo; cpo, simpo and orpo have no reference",
        ),
    ],
)
def test_what_objectives_lack_is_said(faults: Faults, override: str, expected: str) -> None:
    (line,) = faults(RUN, f"adapters.a.{override}")
    assert expected in line


def test_a_4_bit_key_in_quantization_gets_one_line(faults: Faults) -> None:
    (line,) = faults(RUN, "quantization={load_in_4bit: true}")
    assert line.endswith(": quantization.load_in_4bit: unknown key; write `method: bnb-nf4` in its place")
    (line,) = faults(RUN, "quantization={load_in_4bit: true, method: bnb-nf4}")
    assert line.endswith(": quantization.load_in_4bit: unknown key; remove it")


@pytest.mark.parametrize(
    ("more", "formats"),
    [
        ({}, "tokens or text or prompt_completion or alpaca or sharegpt or messages"),
        ({"lora": {"task_type": "SEQ_CLS"}}, "classification"),
        ({"lora": {"task_type": "QUESTION_ANS"}}, "question_answering"),
    ],
)
def test_formats_of_labels_are_named_to_heads_of_labels_only(
    faults: Faults, more: dict, formats: str
) -> None:
    (line,) = faults(
        RUN,
        "datasets.d.format=preference",
        f"adapters=[{ {'name': 'a', 'dataset': 'd', 'lora': {}, **more} }]",
    )
    assert f"objective cross_entropy needs a dataset of format {formats}, got 'preference'" in line


def test_heads_of_labels_have_a_loss_of_their_own(faults: Faults) -> None:
    for objective, format, expected in (
        ("dpo", "text", "objective: task_type SEQ_CLS has a loss of its own; remove objective"),
        ("cross_entropy", "preference", "needs a dataset of format classification, got 'preference'"),
    ):
        own = {"name": "a", "dataset": "d", "objective": objective, "lora": {"task_type": "SEQ_CLS"}}
        (line,) = faults(RUN, f"datasets.d.format={format}", f"adapters=[{own}]")
        assert line.endswith(expected)


def test_a_key_in_the_wrong_place_of_a_search_is_named_once(faults: Faults) -> None:
    (line,) = faults(SWEEP, "sweep.search.beta={low: 0.1, high: 0.5}")
    assert "sweep.search.beta: unknown key here; it belongs in objective" in line


@pytest.mark.parametrize("where", ["", "defaults.", "adapters.a."])
def test_what_has_no_counterpart_here_is_said_to_have_none(faults: Faults, where: str) -> None:
    for key in ("fsdp_config", "eval_accumulation_steps", "eval_delay", "eval_on_start", "data_seed"):
        (line,) = faults(RUN, f"{where}{key}=1")
        assert line.endswith(f": unknown key; {key} of Transformers' TrainingArguments is not supported")


def test_known_keys_are_listed_once(faults: Faults) -> None:
    other, first, second = faults(RUN, "plugins=1", "qqqqq=1", "defaults.qqqqq=1")
    assert first.startswith("--set plugins=1: plugins: unknown key; known keys: base_model, output_dir,")
    assert second == "--set qqqqq=1: qqqqq: unknown key"
    assert "defaults.qqqqq: unknown key; known keys: per_device_train_batch_size" in other


def test_no_key_of_transformers_is_guessed() -> None:
    known = list(TrainingFields.model_fields)
    for key in (field.name for field in dataclasses.fields(TrainingArguments)):
        if key not in known and "did you mean" in (said := unknown_key(key, known)):
            assert any(key in aliases for aliases in other_tools().names.values()), said


def test_each_alias_leads_to_a_key_and_is_none_itself() -> None:
    models = [
        TrainingFields,
        AdapterConfig,
        RunConfig,
        DatasetConfig,
        PipelineConfig,
        QuantizationConfig,
        SchedulerConfig,
        SweepConfig,
    ]
    keys = {key for model in models for key in model.model_fields} | {*CHOICES, *LEAF_KEYS}
    assert keys >= other_tools().names.keys()
    aliases = [alias for names in other_tools().names.values() for alias in names]
    assert keys.isdisjoint(aliases)
    assert sorted(alias for alias in aliases if aliases.count(alias) > 1) == ["data", "data"]


def test_all_unknown_keys_of_a_lora_block_are_named_at_once(faults: Faults) -> None:
    assert faults(RUN, "adapters.a.lora={rank: 8, alpha: 16, dropout: 0.1}") == [
        f"--set adapters.a.lora={{rank: 8, alpha: 16, dropout: 0.1}}: adapters.a.lora.{key}: unknown key; "
        f"did you mean {name!r}?"
        for key, name in [("rank", "r"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout")]
    ]


def test_all_faults_of_a_lora_block_are_named_at_once(faults: Faults) -> None:
    lines = faults(RUN.replace("{r: 4}", "{r: 0, lora_alpha: 0, lora_dropout: 3, target_modules: []}"))
    assert [line.split(": ")[1] for line in lines] == [
        "adapters.a.lora.r",
        "adapters.a.lora.target_modules",
        "adapters.a.lora.lora_alpha",
        "adapters.a.lora.lora_dropout",
    ]


def test_all_datasets_that_are_missing_are_named_at_once(faults: Faults) -> None:
    assert faults(RUN.replace("dataset: d", "dataset: x")) == [
        f"run.yaml: adapters.{name}.dataset: no dataset is named 'x'; datasets: d" for name in "ab"
    ]


def test_a_key_with_dots_is_shown_nested(faults: Faults) -> None:
    (line,) = faults(RUN.replace("lora: {r: 4}", "init_from: x, lora.r: 4"))
    assert line == (
        "run.yaml: adapters.a.lora.r: unknown key; keys are nested, not joined by dots: lora: {r: ...}"
    )


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ("{learning_rate: {min: 1, max: 2}}", "learning_rate.min: unknown key; did you mean 'low'?"),
        ("{learning_rate: {values: [1, 2]}}", "learning_rate.values: unknown key; did you mean 'choice'?"),
        (
            "{learning_rate: [1, 2]}",
            "learning_rate: must be {choice: [...]} or {low: ..., high: ...}, got [1, 2]; write a "
            "fixed value under sweep.adapter",
        ),
        ("{lr: {low: 1, high: 2}}", "sweep.search.lr: unknown key; did you mean 'learning_rate'?"),
        ("{lora: {rank: {choice: [1]}}}", "sweep.search.lora.rank: unknown key; did you mean 'r'?"),
        ("{3: {choice: [1]}}", "sweep.search[3]: a key must be text, got 3; put it in quotes"),
    ],
)
def test_mistakes_in_a_search_space(faults: Faults, search: str, expected: str) -> None:
    (line,) = faults(SWEEP, f"sweep.search={search}")
    assert expected in line


def test_a_run_without_these_mistakes_is_read(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for text in (RUN, SWEEP):
        (tmp_path / "run.yaml").write_text(text)
        assert load_config(tmp_path / "run.yaml").base_model == str(tmp_path / "model")
    assert yaml.safe_load(RUN)["adapters"][0]["lora"] == {"r": 4}
