"""`mlora examples` copies the examples folder."""

from pathlib import Path

from command_line import Run, only_line
from mlora.config.config_file import load_config

EXAMPLES = Path(__file__).parents[3] / "examples"


def files_of(folder: Path) -> dict[str, bytes]:
    """The contents of a folder by relative path, without bytecode."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_all_examples_are_copied(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "mine"
    result = run("examples", folder)
    assert (result.exit_code, result.stdout) == (
        0,
        f"{folder}: written; its README.md lists the examples\n"
        f"to begin: mlora train {folder}/quickstart.yaml\n",
    )
    assert files_of(folder) == files_of(EXAMPLES)
    config = load_config(folder / "quickstart.yaml")
    assert Path(config.output_dir) == tmp_path / "a" / "runs" / "quickstart"


def test_an_empty_folder_is_filled(run: Run, tmp_path: Path) -> None:
    assert run("examples", tmp_path).exit_code == 0
    assert files_of(tmp_path) == files_of(EXAMPLES)


def test_what_is_there_stays(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert only_line(run("examples", tmp_path)) == f"error: {tmp_path}: is not empty; give a new folder"
    assert files_of(tmp_path) == {"mine": b"mine"}


def test_a_folder_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for folder, reason in ((tmp_path / "mine", "File exists"), (tmp_path / "mine" / "a", "Not a directory")):
        assert only_line(run("examples", folder)) == f"error: {folder}: cannot be written: {reason}"
