"""`mlora schema` prints or writes a JSON schema."""

import json
from pathlib import Path

from command_line import Run, only_line


def test_it_prints_the_schema_of_a_run(run: Run) -> None:
    done = run("schema")
    assert done.exit_code == 0
    assert "adapters" in json.loads(done.stdout)["properties"]


def test_it_writes_the_schema_of_a_submission(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    done = run("schema", "--of", "submission", "--output", file)
    assert done.exit_code == 0
    assert f"# yaml-language-server: $schema={file}" in done.stdout
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert "priority" in schema["properties"]
    assert "adapters" not in schema["properties"]


def test_a_folder_that_is_missing_is_one_line(run: Run, tmp_path: Path) -> None:
    done = run("schema", "--output", tmp_path / "none" / "run.json")
    assert "cannot be saved" in only_line(done)
