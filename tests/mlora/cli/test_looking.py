"""Commands that look at a foreign config or run: they run none of its code."""

import builtins
import json
import shutil
from pathlib import Path

import pytest
import yaml
from command_line import Run
from tiny_run import run_data, write_run

EVIL = """
from pathlib import Path
from transformers import TrainerCallback
Path({marker!r}).touch()

def loss(rows):
    return -rows.sums()

class Calls(TrainerCallback):
    pass
"""


def test_looking_runs_no_code(run: Run, trained: Path, tiny_base: Path, tmp_path: Path) -> None:
    marker, file = tmp_path / "ran", tmp_path / "evil.py"
    file.write_text(EVIL.format(marker=str(marker)))
    own = {"objective": "evil:loss", "callbacks": ["evil.py:Calls"]}
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= own
    path = write_run(tmp_path, data)
    folder = shutil.copytree(trained, tmp_path / "done")
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    stored["adapters"][0] |= {"objective": {"name": f"{file}:loss"}, "callbacks": [f"{file}:Calls"]}
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    task = tmp_path / "task.yaml"
    task.write_text(yaml.safe_dump(data["adapters"][0] | {"name": "late"}))
    said = run("validate", path)
    assert (said.exit_code, said.stdout.count(f"not run: {file}:Calls, {file}:loss; add --run-code")) == (
        0,
        1,
    )
    for arguments in (
        ("data", "show", path),
        ("status", folder),
        ("report", folder),
        ("submit", folder, task),
        ("evaluate", folder, "second", "--dataset", stored["datasets"][0]["name"]),
        ("export", folder, "first", "--output", tmp_path / "exported"),
        ("merge", folder, "first", "--output", tmp_path / "merged"),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, (arguments, result.stderr)
    refused = run("evaluate", folder, "first")
    assert f"first: its objective {file}:loss is code that `mlora evaluate` does not run" in refused.stderr
    assert not marker.exists()
    assert run("validate", path, "--run-code").exit_code == 0
    assert marker.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_no_command_runs_a_bases_code(
    run: Run, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Transformers would ask whether to run it, and take an answer from standard input."""
    monkeypatch.setattr(builtins, "input", lambda prompt="": "y")
    base, marker = shutil.copytree(tiny_base, tmp_path / "base"), tmp_path / "ran"
    (base / "own.py").write_text(EVIL.format(marker=str(marker)))
    own = {
        "config.json": {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
        "tokenizer_config.json": {
            "tokenizer_class": "Own",
            "auto_map": {"AutoTokenizer": ["own.Own", None]},
        },
    }[file]
    held = json.loads((base / file).read_text())
    (base / file).write_text(json.dumps(held | own))
    data = run_data(base, tmp_path)
    data["datasets"][0] |= {"path": str(tmp_path / "texts.jsonl"), "format": "text"}
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    path = write_run(tmp_path, data)
    for arguments in (
        ("validate", path),
        ("validate", path, "--run-code"),
        ("data", "show", path),
        ("train", path),
    ):
        said = run(*arguments)
        assert file == "tokenizer_config.json" or said.exit_code != 0
        assert "Traceback" not in said.stderr
    assert not marker.exists()
