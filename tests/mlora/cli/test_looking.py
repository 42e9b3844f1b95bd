"""Commands that look at a foreign config or run: they run none of its code."""

import shutil
from pathlib import Path

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
