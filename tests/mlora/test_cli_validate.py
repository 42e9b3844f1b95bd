"""`mlora validate`: all that comes before the first step, and nothing written."""

import os
import shutil
from pathlib import Path

from command_line import Run, only_line
from tiny_run import random_tokens, run_data, write_jsonl, write_run


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
