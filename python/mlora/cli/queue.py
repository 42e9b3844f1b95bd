"""The commands of a run's queue, and ``mlora status``; registered by `mlora.cli.app`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mlora.cli.common import RunDir, command, print_lines, print_rows

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="tasks of the run")]


def status(
    run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False
) -> None:
    """Show how far a run has come and what waits in its queue.

    Reads the run's files, whether the run is at work or not.
    """
    with command():
        from mlora.cli.status import read_status

        found = read_status(run_dir)
        if as_json:
            print(json.dumps(found.as_json()))
            return
        print(found.line)
        print_rows(found.table())
        print_lines(found.notes())


def submit(
    run_dir: RunDir,
    tasks: Annotated[
        list[Path],
        typer.Argument(
            metavar="TASK.yaml...",
            help="one task each: an adapter's keys (name, dataset, lora, ...) and datasets the run lacks",
        ),
    ],
) -> None:
    """Give a run further tasks, while it trains or afterwards."""
    with command():
        from mlora.queue.requests import submit

        print_lines(submit(run_dir, tasks))


def cancel(run_dir: RunDir, names: Names) -> None:
    """End tasks of a run for good; what they have learned is not kept."""
    with command():
        from mlora.queue.requests import change

        print_lines(change(run_dir, "cancel", names))


def pause(run_dir: RunDir, names: Names) -> None:
    """Set tasks of a run aside until they are unpaused.

    Meanwhile other tasks use their memory.
    """
    with command():
        from mlora.queue.requests import change

        print_lines(change(run_dir, "pause", names))


def unpause(run_dir: RunDir, names: Names) -> None:
    """Let paused tasks of a run go on where they were."""
    with command():
        from mlora.queue.requests import change

        print_lines(change(run_dir, "unpause", names))
