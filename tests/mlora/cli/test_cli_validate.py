"""`mlora validate`: all that comes before the first step, and nothing written."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from command_line import Run, only_line
from safetensors import safe_open
from tiny_run import random_tokens, run_data, write_jsonl, write_run


def test_validate_writes_nothing(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    before = sorted(tmp_path.rglob("*"))
    result = run("validate", path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"{path}: 2 adapters are ready to train"
    assert sorted(tmp_path.rglob("*")) == before


def test_one_adapter_is_ready(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    path = write_run(tmp_path, data | {"adapters": data["adapters"][:1]})
    assert run("validate", path).stdout.splitlines()[-1] == f"{path}: 1 adapter is ready to train"


def test_defaults_of_evaluations_that_nobody_makes(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["defaults"] |= {"eval_steps": 3, "early_stopping_patience": 2}
    del data["adapters"][0]["eval_dataset"], data["adapters"][0]["eval_steps"]
    line = (
        "defaults: eval_steps, early_stopping_patience change nothing, since no adapter has an eval_dataset"
    )
    assert line in run("validate", write_run(tmp_path, data)).stderr
    data["adapters"][1]["eval_dataset"] = "two"
    assert "change nothing" not in run("validate", write_run(tmp_path, data)).stderr


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


def test_doubts_are_warned_of_once(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    first, second = data["adapters"]
    first |= {
        "warmup_steps": 7,
        "lora": {"r": 33, "target_modules": ["q_proj", "k_porj", "self_attn.v_proj"]},
    }
    second["lora"] = {
        "r": 2,
        "target_modules": "all-linear",
        "exclude_modules": ["o_proj", "q_porj"],
        "rank_pattern": {"q_proj": 3, "self_attn.q_proj": 4, "up_proj$": 5},
        "alpha_pattern": {"lm_head": 3},
    }
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "warning: first: warmup_steps is 7, but training ends at step 6; the learning rate does not "
        "reach 0.005",
        "warning: first: lora.target_modules: 'k_porj' matches nothing in the model; did you mean 'k_proj'?",
        "warning: first: lora.r: 33 is too high; model.layers.0.self_attn.q_proj can use 32 at most",
        "warning: second: lora.rank_pattern: 'self_attn.q_proj' applies to none of the adapter's layers",
        "warning: second: lora.alpha_pattern: 'lm_head' applies to none of the adapter's layers",
        "warning: second: lora.exclude_modules: 'q_porj' excludes nothing in the model",
    ]
    result = run("train", tmp_path / "run.yaml", "--set", "defaults.max_steps=1")
    assert result.stderr.count("k_porj") == 1


def test_modules_that_are_trained_whole_and_targeted_are_told_of(
    run: Run, tiny_base: Path, tmp_path: Path
) -> None:
    """PEFT trains the copy, and puts no low-rank parts on it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    data = run_data(tiny_base, tmp_path)
    lora = {"r": 2, "target_modules": ["lm_head", "q_proj"], "modules_to_save": ["lm_head"]}
    data["adapters"] = [data["adapters"][0] | {"lora": lora}]
    result = run("train", write_run(tmp_path, data), "--set", "defaults.max_steps=1")
    assert result.exit_code == 0
    assert result.stderr.splitlines()[-1] == (
        "warning: first: lora.modules_to_save: 'lm_head' covers modules of target_modules; they are trained "
        "whole and get no low-rank parts, as in PEFT"
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_base), LoraConfig(**lora))
    theirs = {key.replace(".default", "") for key, p in model.named_parameters() if p.requires_grad}
    with safe_open(tmp_path / "run/adapters/first/adapter_model.safetensors", "pt") as file:
        ours = set(file.keys())
    assert ours == {key.replace(".modules_to_save", "") for key in theirs}


def test_one_line_for_a_file_that_several_adapters_miss(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    (tmp_path / "two.jsonl").unlink()
    assert run("validate", write_run(tmp_path, data)).stderr.splitlines() == [
        f"error: first, second: refused: {tmp_path}/two.jsonl: cannot be read: No such file or directory",
        "error: every adapter was refused; nothing to train",
    ]


def test_a_rank_beyond_memory(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    line = only_line(run("validate", path, "--set", "adapters.first.lora.r=2000000000"))
    assert line == "error: first: out of memory for its weights; lower lora.r"


def test_more_memory_than_is_free(
    run: Run, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a warning: nobody asked for a limit."""
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert "scheduler.memory_limit" not in run("validate", path).stderr
    monkeypatch.setattr("mlora.run.validation.free_memory", lambda device: 0)
    # earlier tests of this process may have left more than the run needs
    monkeypatch.setattr("mlora.run.validation.used_memory", lambda device: 0)
    result = run("validate", path, "--set", "adapters.first.lora.r=4000")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"the run needs about .* of memory, but .* set scheduler\.memory_limit", result.stderr)


def test_memory_that_cannot_be_predicted(
    run: Run, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_stages(*_: object) -> None:
        raise ValueError("this model cannot be run dry")

    monkeypatch.setattr("mlora.run.validation.dry_stages", no_stages)
    result = run("validate", write_run(tmp_path, run_data(tiny_base, tmp_path)))
    assert result.exit_code == 0, result.stderr
    assert "warning: memory cannot be predicted: this model cannot be run dry" in result.stderr


@pytest.mark.usefixtures("no_cuda_kernels")
def test_the_default_device_is_never_another_one_silently(
    run: Run, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = run_data(tiny_base, tmp_path)
    del data["device"]
    path = write_run(tmp_path, data)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(sys.modules, "mlora_ext.backends.triton", None)  # as where triton is not installed
    line = only_line(run("validate", path))
    assert line.startswith("error: device: cuda, the default because this torch sees CUDA: backend 'triton' ")
    assert line.endswith("; set device: cpu (generate: --device cpu)")
    assert run("validate", path, "--set", "device=cpu").exit_code == 0


def test_output_folders_that_cannot_be_written(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    for command in ("train", "validate"):
        line = only_line(run(command, path, "--set", f"output_dir={path}/run"))
        assert line == f"error: output_dir: {path}/run cannot be made: {path} is not a folder"
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        line = only_line(run("validate", path, "--set", f"output_dir={closed}/run"))
        assert line == f"error: output_dir: {closed}/run cannot be written: {closed}: Permission denied"
    if Path("/proc").is_dir():  # closed to root, too
        line = only_line(run("validate", path, "--set", "output_dir=/proc/run"))
        assert line.startswith("error: output_dir: /proc/run cannot be written: /proc: ")
    line = only_line(run("validate", path, "--set", f"output_dir={tmp_path}/{'x' * 300}"))
    assert line.endswith("cannot be reached: File name too long")
    line = only_line(run("validate", path, "--set", "output_dir=~no-one-of-this-name/run"))
    assert line.endswith("output_dir: ~no-one-of-this-name/run: there is no such user's folder")


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


OWN_LOSSES = """import torch

def raises(rows, beta=0.1):
    if beta > 1:
        return -rows.sums()
    chosen = rows.sums()
    return torhc.relu(chosen)

def shape(rows):
    return -rows.log_p

def detached(rows):
    return -rows.sums().detach()

def lacks(rows):
    return rows.sums()[0::2] - rows.silent_sums()[0::2]

def pairs(rows):
    apart = rows.sums() - rows.silent_sums()
    return apart[1::2] - apart[0::2], {"apart": apart[0::2]}
"""


def test_losses_of_ones_own_are_tried(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    """Each on rows of its own data; the line of the fault is that in its file."""
    file = tmp_path / "tried.py"
    file.write_text(OWN_LOSSES)
    data = run_data(tiny_base, tmp_path)
    write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "bc", "rejected": "d"}] * 3)
    data["datasets"].append({"name": "pairs", "path": "pairs.jsonl", "format": "preference"})
    wanted = {"dataset": "pairs", "max_steps": 1, "lora": {"r": 2, "target_modules": ["q_proj"]}}
    pairs = {"name": "tried:pairs", "takes": "pairs", "reference": "__base__"}
    data["adapters"] = [
        data["adapters"][1] | {"name": "raises", "objective": "tried:raises"},
        data["adapters"][1] | {"name": "fine", "objective": {"name": "tried:raises", "beta": 2.0}},
        data["adapters"][1] | {"name": "shape", "objective": "tried:shape"},
        data["adapters"][1] | {"name": "detached", "objective": "tried:detached"},
        wanted | {"name": "lacks", "objective": {"name": "tried:lacks", "takes": "pairs"}},
        wanted | {"name": "pairs", "objective": pairs},
    ]
    result = run("validate", write_run(tmp_path, data), "--run-code")
    assert result.exit_code == 1
    told = result.stderr.splitlines()
    rows = re.search(r"got \[(\d+)\]", told[1])
    assert rows is not None
    assert int(rows[1]) > 3
    assert told[:3] == [
        "error: raises: refused: objective: raises failed: NameError: name 'torhc' is not defined, in "
        f"{file}:7",
        "error: shape: refused: objective: shape must return the losses of each of 3 samples, a tensor [3], "
        f"got [{rows[1]}], in {file}:9",
        "error: detached: refused: objective: detached failed: RuntimeError: element 0 of tensors does not "
        f"require grad and does not have a grad_fn, in {file}:12",
    ]
    assert told[3].startswith("error: lacks: refused: objective: lacks failed: ValueError: ")
    assert told[3].endswith(f"in {file}:16")
    assert told[4:] == [f"error: {tmp_path / 'run.yaml'}: 4 of 6 adapters would be refused"]
    for adapter in data["adapters"]:
        adapter["objective"] = pairs if adapter["dataset"] == "pairs" else data["adapters"][1]["objective"]
    result = run("validate", write_run(tmp_path, data), "--run-code")
    assert result.exit_code == 0, result.stderr
    data["adapters"] = [data["adapters"][0] | {"objective": "tried:shape"}]
    result = run("validate", write_run(tmp_path, data), "--run-code")
    assert result.stderr.splitlines()[-1] == "error: every adapter was refused; nothing to train"


@pytest.mark.parametrize("key", ["metric_for_best_model", "sweep.metric"])
def test_a_metric_that_an_own_loss_lacks(run: Run, tiny_base: Path, tmp_path: Path, key: str) -> None:
    """One that only evaluations have, which are without gradients, counts."""
    (tmp_path / "lacks.py").write_text(
        "import torch\n\n"
        "def loss(rows):\n"
        "    name = 'one' if torch.is_grad_enabled() else 'late'\n"
        "    return -rows.sums(), {name: rows.sums()}\n"
    )
    data = run_data(tiny_base, tmp_path)
    first = data["adapters"][0] | {"objective": "lacks:loss"}
    for metric, lacking in (("late", False), ("two", True)):
        if key == "sweep.metric":
            shared = {name: value for name, value in first.items() if name != "name"}
            search = {"learning_rate": {"choice": [1e-3, 1e-2]}}
            data["sweep"] = {"trials": 2, "metric": metric, "adapter": shared, "search": search}
            data.pop("adapters", None)
        else:
            data["adapters"] = [first | {key: metric}, data["adapters"][-1]]
        result = run("validate", write_run(tmp_path, data), "--run-code")
        told = f"refused: {key}: eval_two is not measured; metrics: eval_loss, eval_late"
        assert (told in result.stderr, result.exit_code) == (lacking, int(lacking)), result.stderr
