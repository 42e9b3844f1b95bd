"""The command line: what it prints, how it ends, and one clear line for every bad input."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mlora.cli import app
from mlora.device import load_operators
from mlora.errors import RunError
from mlora.run_folder import Metrics
from safetensors.torch import load_file, save_file
from tiny_run import random_tokens, run_data, save_base, write_jsonl, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)

    return invoke


@pytest.fixture(scope="module")
def trained(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, whose adapters the tests only read."""
    folder = tmp_path_factory.mktemp("trained")
    path = write_run(folder, run_data(tiny_base, folder))
    assert CliRunner().invoke(app, ["train", str(path)]).exit_code == 0
    return folder / "run"


def only_line(result: Result) -> str:
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert result.exit_code == 1
    return lines[0]


def test_help_comes_without_torch() -> None:
    code = (
        "import sys, mlora.cli as c; c.app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "validate" in done.stdout
    assert done.stdout.endswith("False\n")


def test_train_prints_plain_lines_and_a_table(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    result = run("train", path, "--set", "adapters.second.max_steps=4", "--set", "defaults.logging_steps=3")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "first: 11 samples, 6 steps"
    assert next(line for line in lines if line.startswith("second: step")).startswith(
        "second: step 3/4 loss "
    )
    assert "second: finished at step 4" in lines
    assert lines[-4].split() == ["adapter", "state", "step", "loss", "eval", "loss", "before", "after"]
    assert lines[-2].split()[:3] == ["second", "finished", "4/4"]
    assert lines[-1].endswith(f"s: {tmp_path}/run")
    assert "\x1b" not in result.stdout


def test_overwrite_replaces_a_run_and_nothing_else(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert run("train", path).exit_code == 0
    assert "is not empty; continue it with `mlora resume" in only_line(run("train", path))
    short = ("--set", "adapters.first.max_steps=1", "--set", "adapters.second.max_steps=1")
    assert run("train", path, "--overwrite", *short).exit_code == 0
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert not list((tmp_path / "run" / "checkpoints").glob("*.pt"))

    (tmp_path / "run" / "adapters" / "first" / "notes.txt").write_text("mine")
    line = only_line(run("train", path, "--overwrite"))
    assert line == (
        f"error: output_dir: {tmp_path}/run/adapters/first/notes.txt was not written by a run; "
        "move it away before --overwrite"
    )
    assert (tmp_path / "run" / "adapters" / "second" / "adapter_model.safetensors").is_file()


def test_overwrite_keeps_its_hands_off_other_folders(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years")
    assert "holds no config.yaml" in only_line(run("train", path, "--overwrite"))
    assert (tmp_path / "run" / "thesis.txt").read_text() == "years"


def test_overwrite_does_not_remove_what_the_run_reads(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert run("train", path).exit_code == 0
    first = tmp_path / "run" / "adapters" / "first"
    again = ("--set", f"adapters.first.init_from={first}", "--set", "adapters.first.lora=null")
    assert f"--overwrite would remove {first}" in only_line(run("train", path, "--overwrite", *again))
    assert (first / "adapter_model.safetensors").is_file()


def test_resume_and_status_of_a_finished_run(run: Run, trained: Path) -> None:
    result = run("status", trained)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"finished: {trained}"
    assert "9/9" in result.stdout
    result = run("resume", trained)
    assert result.exit_code == 0
    assert "finished" in result.stdout


def test_status_of_an_unfinished_run(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "summary.json").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:6]) + '{"adapter": "fi')
    result = run("status", copy)
    assert result.stdout.startswith(f"not running; `mlora resume {copy}` continues from its last checkpoint")
    assert [line.split()[1] for line in result.stdout.splitlines()[2:]] == ["unfinished", "unfinished"]
    summary = json.loads((trained / "summary.json").read_text())
    summary |= {"status": "running"}
    summary["adapters"]["first"]["state"] = "running"
    (copy / "summary.json").write_text(json.dumps(summary))
    assert [line.split()[1] for line in run("status", copy).stdout.splitlines()[2:]] == [
        "unfinished",
        "finished",
    ]
    with Metrics(copy / "metrics.jsonl", keep_all=True):
        assert run("status", copy).stdout.startswith(f"running: {copy}")
    (copy / "metrics.jsonl").unlink()
    shutil.rmtree(copy / "checkpoints")
    result = run("status", copy)
    assert "continues from the start, for it has no checkpoint" in result.stdout
    assert "holds no config.yaml" in only_line(run("status", tmp_path))
    assert "holds no config.yaml" in only_line(run("resume", tmp_path))


def test_validate_writes_nothing(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    before = sorted(tmp_path.rglob("*"))
    result = run("validate", path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"{path}: 2 adapters are ready to train"
    assert sorted(tmp_path.rglob("*")) == before


def test_validate_names_every_adapter_at_fault(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0]["lora"]["target_modules"] = ["w_proj"]
    third = {"name": "third", "dataset": "gone", "lora": {"r": 2}}
    data["datasets"].append({"name": "gone", "path": "gone.jsonl", "format": "tokens"})
    result = run("validate", write_run(tmp_path, data | {"adapters": [*data["adapters"], third]}))
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert (
        lines[0] == f"error: third: refused: {tmp_path}/gone.jsonl: cannot be read: No such file or directory"
    )
    assert lines[1].startswith("error: first: refused: ")
    assert "w_proj" in lines[1]
    assert lines[2].endswith("2 of 3 adapters would be refused")


def test_generate_is_what_peft_generates(run: Run, trained: Path, tiny_base: Path) -> None:
    from peft import PeftModel

    prompts = ["ab", "a longer one", "xy"]
    result = run(
        "generate", trained, *(x for p in prompts for x in ("-p", p)), "--max-new-tokens", 6, "--json"
    )
    assert result.exit_code == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(a["prompt"], a["adapter"]) for a in answers] == [
        (p, n) for p in prompts for n in ("first", "second")
    ]
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    for name in ("first", "second"):
        base = AutoModelForCausalLM.from_pretrained(tiny_base)
        model = PeftModel.from_pretrained(base, trained / "adapters" / name)
        for prompt in prompts:
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            output = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            got = [a["completion"] for a in answers if (a["prompt"], a["adapter"]) == (prompt, name)]
            assert got == [expected]


def test_generate_from_one_folder_and_from_the_base(run: Run, trained: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    one = run("generate", trained / "adapters" / "first", "--prompts", prompts, "--max-new-tokens", 3)
    assert one.exit_code == 0, one.stderr
    assert one.stdout.startswith("[first] hello")
    drawn = [
        run("generate", trained, "-a", "__base__", "-p", "x", "--temperature", 1, "--seed", seed).stdout
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "has no trained adapter 'nope'; it has first, second" in only_line(
        run("generate", trained, "-a", "nope", "-p", "x")
    )
    assert "no prompt: give --prompt TEXT" in only_line(run("generate", trained))
    assert "top_p: must be above 0" in only_line(run("generate", trained, "-p", "x", "--top-p", 0))
    assert "a prompt has no tokens" in only_line(run("generate", trained, "-p", ""))
    assert "is neither a run's output_dir nor a PEFT adapter folder" in only_line(
        run("generate", tmp_path, "-p", "x")
    )


def test_generate_from_odd_folders_and_prompts(run: Run, trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / "adapters" / "first", tmp_path / "first.v1")
    result = run("generate", folder, "-p", "x" * 62)  # the model has 64 positions
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("[first-v1] x")
    assert "a prompt of 64 tokens leaves no room for an answer: the base model takes at most 64" in only_line(
        run("generate", folder, "-p", "x" * 64)
    )
    (folder / "adapter_config.json").write_text("[1]")
    assert "adapter_config.json: cannot be read: is not a JSON object" in only_line(
        run("generate", folder, "-p", "x")
    )


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("config.yaml", "adapters: 3", "config.yaml: has no list of adapters with names"),
        ("summary.json", "{}", "summary.json: cannot be read: is not a run's summary"),
        ("metrics.jsonl", "3\n", "metrics.jsonl:1: is not a line of metrics"),
    ],
)
def test_status_of_broken_files(
    run: Run, trained: Path, tmp_path: Path, file: str, text: str, expected: str
) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / file).write_text(text)
    assert expected in only_line(run("status", folder))


def bad_line(folder: Path, line: str) -> None:
    with open(folder / "one.jsonl", "a") as file:
        file.write(line + "\n")


# What is wrong, how a run of two adapters is made so, and what the line says; `first` is at fault.
REFUSED: list[tuple[str, Callable[[dict[str, Any], Path], object], str]] = [
    ("missing data", lambda d, f: (f / "one.jsonl").unlink(), "one.jsonl: cannot be read: No such file"),
    ("malformed line", lambda d, f: bad_line(f, "{oops"), "one.jsonl:12: is not JSON"),
    ("empty data", lambda d, f: (f / "one.jsonl").write_text(""), "the dataset 'one' is empty"),
    (
        "id out of range",
        lambda d, f: bad_line(f, '{"input_ids": [260]}'),
        "one.jsonl:12: token id 260 is outside",
    ),
    (
        "labels of another length",
        lambda d, f: bad_line(f, '{"input_ids": [1, 2], "labels": [1]}'),
        "one.jsonl:12: 'labels' has 1 entries, but 'input_ids' has 2",
    ),
    (
        "NaN in data",
        lambda d, f: bad_line(f, '{"input_ids": [1, NaN]}'),
        "one.jsonl:12: 'input_ids' must hold whole",
    ),
    (
        "targets that match nothing",
        lambda d, f: d["adapters"][0]["lora"].update(target_modules=["w_proj"]),
        "target_modules={'w_proj'}",
    ),
    (
        "a feature that is not there",
        lambda d, f: d["adapters"][0]["lora"].update(use_dora=True),
        "use_dora=True is not supported",
    ),
    (
        "no adapter folder",
        lambda d, f: d["adapters"][0].update(lora=None, init_from="nowhere"),
        "nowhere is not a PEFT folder: it holds no adapter_config.json",
    ),
]


@pytest.mark.parametrize(
    ("break_it", "expected"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_bad_input_refuses_one_adapter(
    run: Run, tiny_base: Path, tmp_path: Path, break_it: Callable[..., object], expected: str
) -> None:
    data = run_data(tiny_base, tmp_path, defaults={"max_steps": 1})
    data["adapters"][1]["max_steps"] = 1
    break_it(data, tmp_path)
    result = run("train", write_run(tmp_path, data))
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: first: refused: ")
    assert expected in lines[0]
    assert "Traceback" not in result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [summary["adapters"][name]["state"] for name in ("first", "second")] == ["refused", "finished"]
    assert (tmp_path / "run" / "adapters" / "second" / "adapter_model.safetensors").is_file()


def test_adapter_folder_of_another_base(run: Run, trained: Path, tmp_path: Path) -> None:
    other = save_base(tmp_path / "other", hidden=64)
    data = run_data(other, tmp_path)
    data["adapters"][0] |= {"lora": None, "init_from": str(trained / "adapters" / "first")}
    result = run("train", write_run(tmp_path, data))
    assert result.exit_code == 1
    assert "is it an adapter of another base" in result.stderr.splitlines()[0]
    line = only_line(run("generate", trained / "adapters" / "first", "-p", "x", "--base-model", other))
    assert "is it an adapter of another base" in line


def test_resume_of_a_failed_run_names_the_fault_again(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path, defaults={"max_steps": 1})
    bad_line(tmp_path, "{oops")
    assert run("train", write_run(tmp_path, data)).exit_code == 1
    assert only_line(run("resume", tmp_path / "run")).startswith("error: first: refused: ")


def test_lora_beside_init_from_must_agree(run: Run, trained: Path, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"init_from": str(trained / "adapters" / "first")}
    path = write_run(tmp_path, data)
    result = run("validate", path)  # all-linear, as the folder was made, whatever names it lists
    assert result.exit_code == 0, result.stderr
    result = run("validate", path, "--set", "adapters.first.lora.r=5")
    assert result.stderr.startswith(
        "error: first: refused: lora.r: 5 does not agree with init_from, whose r is 4"
    )
    result = run("validate", path, "--set", "adapters.first.lora.target_modules=[q_proj]")
    assert result.stderr.startswith("error: first: refused: lora.target_modules: ['q_proj'] does not agree")


def test_folder_of_an_older_peft_agrees_with_the_defaults(
    run: Run, trained: Path, tiny_base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained / "adapters" / "first", tmp_path / "older")
    saved = json.loads((folder / "adapter_config.json").read_text())
    del saved["use_rslora"]
    (folder / "adapter_config.json").write_text(json.dumps(saved))
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"init_from": str(folder), "lora": {"r": 4, "use_rslora": False}}
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 0, result.stderr


CONFIG_FAULTS = [
    ("adapters.0.lora.rr=4", "adapters[0].lora.rr: unknown key; did you mean 'r'?"),
    ("adapters.0.lora.r=0", "adapters[0].lora.r: a rank must be a whole number of at least 1, got 0"),
    ("adapters.0.lora.lora_dropout=1.0", "lora_dropout: must be at least 0 and below 1, got 1.0"),
    ("adapters.0.name=a/b", "adapters[0].name: 'a/b' is not a plain name"),
    ("adapters.0.name=second", "adapters: the name 'second' stands twice"),
    ("base_model=/no/such/base", "base_model: no such folder: /no/such/base"),
    ("device=cuda:99", "device: cuda:99 is not there"),
]


@pytest.mark.parametrize(("override", "expected"), CONFIG_FAULTS)
def test_faults_of_the_config_end_the_run(
    run: Run, tiny_base: Path, tmp_path: Path, override: str, expected: str
) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert expected in only_line(run("train", path, "--set", override))
    assert expected in only_line(run("validate", path, "--set", override))
    assert not (tmp_path / "run").exists()


def test_base_models_that_cannot_be_loaded(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in only_line(run("train", path, "--set", f"base_model={tmp_path}/empty"))
    shutil.copytree(tiny_base, tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    line = only_line(run("train", path, "--set", f"base_model={tmp_path}/weightless"))
    assert line.startswith(f"error: base_model: cannot load {tmp_path}/weightless: ")
    broken = tmp_path / "weightless" / "model.safetensors"
    weights = load_file(tiny_base / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken, metadata={"format": "pt"})
    line = only_line(run("train", path, "--set", f"base_model={tmp_path}/weightless"))
    assert line.endswith("lacks 1 weights, model.layers.1.mlp.up_proj.weight among them")
    broken.write_bytes((tiny_base / "model.safetensors").read_bytes()[:5000])
    assert "base_model: cannot load" in only_line(
        run("train", path, "--set", f"base_model={tmp_path}/weightless")
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str (value: 'wide')"),
        ({"vocab_size": 300}, "mismatched_sizes"),
        ({"num_attention_heads": 5}, "is not a multiple of the number of attention heads (5)"),
    ],
)
def test_base_model_whose_config_is_wrong(
    run: Run, tiny_base: Path, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    shutil.copytree(tiny_base, tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    path = write_run(tmp_path, run_data(tmp_path / "odd", tmp_path))
    line = only_line(run("train", path))
    assert line.startswith(f"error: base_model: cannot load {tmp_path}/odd: ")
    assert expected in line


def test_missing_operators_are_one_line_at_the_start(
    run: Run, trained: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora_ext._ops.LOADED", False)
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    for command in (("train", path), ("validate", path), ("generate", trained, "-p", "x")):
        assert only_line(run(*command)).startswith("error: the compiled operators are missing (")
    assert not (tmp_path / "run").exists()


def test_operators_of_another_torch_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlora_ext").mkdir()
    (tmp_path / "mlora_ext" / "__init__.py").write_text("raise OSError('undefined symbol: aoti')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlora_ext")
    with pytest.raises(RunError, match="operators cannot be loaded: undefined symbol: aoti; build them anew"):
        load_operators()


def test_generate_where_there_is_no_such_device(run: Run, trained: Path) -> None:
    line = only_line(run("generate", trained, "-p", "x", "--device", "cuda:99"))
    assert line.startswith("error: device: cuda:99 is not there")
    line = only_line(run("generate", trained, "-p", "x", "--device", "fast"))
    assert line == "error: device: must be cpu, cuda or cuda:<index>, got 'fast'"


def test_output_folders_that_cannot_be_written(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    for command in ("train", "validate"):
        line = only_line(run(command, path, "--set", f"output_dir={path}/run"))
        assert line == f"error: output_dir: {path}/run cannot be made: {path} is not a folder"
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        line = only_line(run("train", path, "--set", f"output_dir={closed}/run"))
        assert line == f"error: output_dir: {closed}/run cannot be written: no permission for {closed}"


def test_lines_are_not_wrapped(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    assert str(deep) in only_line(run("train", deep / "run.yaml"))


def test_saved_adapters_hold_finite_weights(trained: Path) -> None:
    for name in ("first", "second"):
        weights = load_file(trained / "adapters" / name / "adapter_model.safetensors")
        assert all(tensor.isfinite().all() for tensor in weights.values())
        assert any(tensor.abs().max() > 0 for key, tensor in weights.items() if "lora_B" in key)


def test_a_tokenizer_is_asked_for_only_where_it_is_needed(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_base, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    data = run_data(bare, tmp_path)
    assert run("validate", write_run(tmp_path, data)).exit_code == 0
    data["datasets"][0]["format"] = "text"
    write_jsonl(tmp_path / "two.jsonl", random_tokens(3, seed=1))
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 1
    assert "base_model: cannot load the tokenizer of" in result.stderr.splitlines()[0]
