"""The command line in this process, and what its errors look like."""

from collections.abc import Callable
from pathlib import Path

from mlora.cli.app import app
from typer.testing import CliRunner, Result

Run = Callable[..., Result]


def invoke(*arguments: object) -> Result:
    """Run `mlora` with these arguments; an exception that no command expects is raised here."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def only_line(result: Result) -> str:
    """The one error line of a command that failed."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert result.exit_code == 1
    return lines[0]


def bad_line(folder: Path, line: str) -> None:
    """Append a line to the data of the adapter `first`."""
    with open(folder / "one.jsonl", "a") as file:
        file.write(line + "\n")
