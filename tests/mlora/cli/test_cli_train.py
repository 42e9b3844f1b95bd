"""`mlora train`: what it prints, what it overwrites, and one clear line for every bad input."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run, bad_line, only_line
from mlora.cli.common import how_to_train_again
from mlora.objectives import function_file
from mlora.run.prepare import prepare
from mlora.store.run_folder import Metrics
from mlora.tasks.result import AdapterResult, RunResult
from safetensors.torch import load_file
from tiny_run import run_data, save_base, write_run


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
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003.pt"]

    (tmp_path / "run" / "adapters" / "first" / "notes.txt").write_text("mine")
    line = only_line(run("train", path, "--overwrite"))
    assert line == (
        f"error: output_dir: {tmp_path}/run/adapters/first/notes.txt was not written by a run; "
        "move it away before --overwrite"
    )
    assert (tmp_path / "run" / "adapters" / "second" / "adapter_model.safetensors").is_file()


def test_overwrite_leaves_a_run_that_began_meanwhile(
    run: Run, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    assert run("train", path).exit_code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    running = []

    def prepare_slowly(*arguments: Any, **named: Any) -> Any:
        running.append(Metrics(tmp_path / "run" / "metrics.jsonl"))
        return prepare(*arguments, **named)

    monkeypatch.setattr("mlora.run.run.prepare", prepare_slowly)
    line = only_line(run("train", path, "--overwrite", "--set", "seed=4"))
    assert line == f"error: {tmp_path}/run: another process is running this run"
    running[0].close()
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before


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


# What is wrong, how a run of two adapters is made so, and what the line says; `first` is at fault.
REFUSED: list[tuple[str, Callable[[dict[str, Any], Path], object], str]] = [
    ("missing data", lambda d, f: (f / "one.jsonl").unlink(), "one.jsonl: cannot be read: No such file"),
    (
        "malformed line",
        lambda d, f: bad_line(f, "{oops"),
        "one.jsonl:12: is not JSON: Expecting property name enclosed in double quotes at character 2",
    ),
    (
        "cut line",
        lambda d, f: bad_line(f, '{"input_ids": [1'),
        "is not JSON: Expecting ',' delimiter at char",
    ),
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
        "target_modules=['w_proj'] match nothing; did you mean 'v_proj'? linear layers of this model: q_proj",
    ),
    (
        "a task of another kind of base",
        lambda d, f: d["adapters"][0]["lora"].update(task_type="SEQ_2_SEQ_LM"),
        "task_type=SEQ_2_SEQ_LM is not for causal language models, and the base model is one; remove it, or",
    ),
    (
        "targets that are all trained whole",
        lambda d, f: d["adapters"][0]["lora"].update(target_modules=["q_proj"], modules_to_save=["q_proj"]),
        "target_modules=['q_proj'] (with modules_to_save) match nothing; without modules_to_save=['q_proj'] "
        "they would",
    ),
    (
        "a feature that is not there",
        lambda d, f: d["adapters"][0]["lora"].update(use_qalora=True),
        "use_qalora=True is not supported",
    ),
    (
        "no adapter folder",
        lambda d, f: d["adapters"][0].update(lora=None, init_from="nowhere"),
        "init_from: no such folder: ",
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
    run_dir = tmp_path / "run"
    assert f"`mlora submit {run_dir} TASK.yaml`, then `mlora resume {run_dir}`" in result.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [summary["adapters"][name]["state"] for name in ("first", "second")] == ["refused", "finished"]
    assert (tmp_path / "run" / "adapters" / "second" / "adapter_model.safetensors").is_file()


def test_saved_adapters_hold_finite_weights(trained: Path) -> None:
    for name in ("first", "second"):
        weights = load_file(trained / "adapters" / name / "adapter_model.safetensors")
        assert all(tensor.isfinite().all() for tensor in weights.values())
        assert any(tensor.abs().max() > 0 for key, tensor in weights.items() if "lora_B" in key)


def test_a_run_says_how_to_train_a_stopped_adapter_after_all(
    run: Run, tiny_base: Path, tmp_path: Path
) -> None:
    """And so it goes: the corrected loss is submitted under another name."""
    file = tmp_path / "breaks.py"
    file.write_text(
        "calls = []\n\ndef loss(rows):\n    calls.append(0)\n"
        "    assert len(calls) < 6\n    return -rows.sums()\n"
    )
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"objective": "breaks:loss", "eval_dataset": None, "eval_steps": None}
    first = data["adapters"][0]
    result = run("train", write_run(tmp_path, data))
    folder = tmp_path / "run"
    assert re.search(r"^error: first: stopped at step [1-9]: objective: loss failed", result.stderr, re.M)
    assert result.stdout.splitlines()[-1] == (
        "to train a stopped adapter after all, correct what its error names, give it another name and submit "
        f"it: `mlora submit {folder} TASK.yaml`, then `mlora resume {folder}`; it begins anew: no weights of "
        "a stopped adapter are kept"
    )
    file.write_text("def loss(rows):\n    return -rows.sums()\n")
    function_file._folder.cache_clear()  # as in a new process
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(first | {"name": "again"}))
    assert run("submit", folder, tmp_path / "task.yaml").exit_code == 0
    result = run("resume", folder)
    assert "again: finished at step" in result.stdout, result.stderr


def test_what_a_stopped_or_refused_adapter_needs() -> None:
    kept = AdapterResult("stopped", "saved as it was at step 2, the best", saved_step=2)
    apart = AdapterResult("refused", "they are on different stages; use one stage")
    found = [
        how_to_train_again(RunResult("failed", Path("out"), 1.0, adapters))
        for adapters in ({"a": kept}, {"a": kept, "b": apart}, {"c": AdapterResult("finished")})
    ]
    assert found[0][0].endswith("then `mlora resume out`")
    assert found[1][0].startswith("to train a refused or stopped adapter after all")
    assert found[1][0].endswith(
        "`mlora submit out TASK.yaml`, then `mlora resume out --set pipeline.stages=1`"
    )
    assert found[2] == []


def test_what_needs_one_stage_trains_as_it_is_told(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    data = run_data(base, tmp_path, pipeline={"stages": 2})
    lora = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    data["adapters"][0] |= {"lora": lora | {"ensure_weight_tying": True}}
    del data["adapters"][0]["eval_dataset"], data["adapters"][0]["eval_steps"]
    run("train", write_run(tmp_path, data))
    assert f"then `mlora resume {tmp_path / 'run'} --set pipeline.stages=1`" in " ".join(
        capfd.readouterr().out.split()
    )
    task = tmp_path / "task.yaml"
    task.write_text(yaml.safe_dump(data["adapters"][0] | {"name": "again", "max_steps": 2}))
    assert run("submit", tmp_path / "run", task).exit_code == 0
    resumed = run("resume", tmp_path / "run", "--set", "pipeline.stages=1")
    assert "again: finished at step 2" in (resumed.stdout + capfd.readouterr().out).splitlines()
