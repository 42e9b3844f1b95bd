"""Mistakes on the command line: one line on standard error, exit code 1 or 2, never a traceback."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from command_line import Run, only_line
from tiny_run import run_data, write_run

LONG = "x" * 300
WITH_A_RUN = ("resume", "status", "pause", "unpause", "cancel", "submit", "export", "evaluate")


def arguments(command: str, path: object) -> list[object]:
    """A command line that takes a run's folder."""
    return [command, path, *(["first"] if command not in ("resume", "status") else [])]


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"mlora-ext {version('mlora-ext')}\n")


@pytest.mark.parametrize("words", [["--version"], ["--help"]], ids=" ".join)
def test_help_and_version_import_nothing_slow(words: list[str]) -> None:
    slow = {"torch", "transformers", "pydantic", "yaml", "numpy", "scipy", "matplotlib", "rich", "sqlite3"}
    code = (
        f"import sys\nfrom mlora.cli.app import app\n"
        f"try: app({words})\nexcept SystemExit as end: assert not end.code\n"
        f"print(sorted({slow} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) > 1
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_of_what_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("mlora.cli.app.version", missing)
    assert only_line(run("--version")) == "error: the version is unknown: mlora-ext is not installed"


@pytest.mark.parametrize("command", ["train", "sweep", "validate"])
def test_a_config_that_is_no_file(run: Run, tmp_path: Path, command: str) -> None:
    assert only_line(run(command, LONG)) == f"error: {LONG}: cannot be read: File name too long"
    assert only_line(run(command, tmp_path)) == f"error: {tmp_path}: is a folder; expected a YAML file"
    missing = tmp_path / "none.yaml"
    assert only_line(run(command, missing)) == f"error: {missing}: cannot be read: No such file or directory"
    why = "cannot be read: is a pipe or a device; expected a regular file"
    assert only_line(run(command, os.devnull)) == f"error: {os.devnull}: {why}"


@pytest.mark.parametrize("command", WITH_A_RUN)
def test_a_run_that_is_none(run: Run, tmp_path: Path, command: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\n")
    given = arguments(command, file)
    assert only_line(run(*given)) == f"error: {file}: is a file; give the run's output_dir, which is a folder"
    nowhere = tmp_path / "nowhere"
    line = only_line(run(*arguments(command, nowhere)))
    assert line == f"error: {nowhere}: there is no such folder; give the run's output_dir"
    assert "is not a run folder: it has no config.yaml" in only_line(run(*arguments(command, tmp_path)))
    assert "there is no such folder" in only_line(run(*arguments(command, LONG)))


def test_a_source_that_is_none(run: Run, tmp_path: Path) -> None:
    for source in (LONG, tmp_path, tmp_path / "nowhere", os.devnull):
        line = only_line(run("generate", source, "-p", "x"))
        assert line == f"error: {source}: is neither a run's output_dir nor a PEFT adapter folder"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--base-model", LONG], "base_model: '" + "x" * 58 + "… cannot be reached: File name too long"),
        (["--base-model", os.devnull], "base_model: "),
        (["--prompts", LONG], "cannot be read: File name too long"),
        (["--top-p", "nan"], "top_p: must be above 0 and at most 1, got nan"),
        (["--temperature", "inf"], "temperature: must be at least 0 and finite, got inf"),
        (["--device", "tpu"], "device: must be cpu, cuda or cuda:<index>, got 'tpu'"),
        (["--adapter", "nope"], "has no trained adapter 'nope'; it has first, second"),
    ],
)
def test_wrong_options_of_generate(run: Run, trained: Path, options: list[str], expected: str) -> None:
    assert expected in only_line(run("generate", trained, "-p", "x", *options))


@pytest.mark.parametrize("seed", ["-1", str(2**63), "9" * 40, "x"])
def test_seeds_that_are_none(run: Run, trained: Path, seed: str) -> None:
    result = run("generate", trained, "-p", "x", "--seed", seed)
    assert result.exit_code == 2
    assert "Invalid value for '--seed'" in result.stderr


def test_faults_of_a_config_are_lines_of_the_command(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"lora": {"rank": 4, "alpha": 8}, "lr": 1e-3}
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 1
    where = f"error: {tmp_path}/run.yaml: adapters.first"
    assert result.stderr.splitlines() == [
        f"{where}.lora.alpha: unknown key; did you mean 'lora_alpha'?",
        f"{where}.lora.rank: unknown key; did you mean 'r'?",
        f"{where}.lr: unknown key; did you mean 'learning_rate'?",
    ]


def test_a_damaged_file_refuses_its_adapters_only(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["datasets"].append({"name": "table", "path": "d.csv", "format": "prompt_completion"})
    data["adapters"].append({"name": "third", "dataset": "table", "lora": {"r": 2}})
    (tmp_path / "d.csv").write_text("prompt,completion\na,b,c\n")
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0] == (
        f"error: third: refused: {tmp_path}/d.csv:2: has another number of values than the first line has "
        "names"
    )


def test_help_is_not_cut(run: Run) -> None:
    assert "..." not in run("--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--steps", "9" * 30],
            "forward passes of a stage; the limit is 10000000: lower --steps, --adapters",
        ),
        (["--adapters", "9" * 30], "forward passes of a stage; the limit is 10000000"),
        (["--forward", ""], "--forward: expected milliseconds such as 1.5 or 1,2,2,1, got ''"),
        (["--backward", ""], "--backward: expected milliseconds such as 1.5 or 1,2,2,1, got ''"),
    ],
)
def test_wrong_options_of_simulate(run: Run, options: list[str], expected: str) -> None:
    assert expected in only_line(run("simulate", *options))


def test_one_layer_that_was_meant_as_a_list(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0]["lora"]["target_modules"] = "q_proj"
    result = run("validate", write_run(tmp_path, data))
    assert result.exit_code == 1
    assert "target_modules='q_proj' match nothing" in result.stderr
    assert "did you mean ['q_proj']?" in result.stderr
