"""The commands of a run's queue, and ``mlora status``; registered by `mlora.cli.app`."""

import json
from pathlib import Path
from typing import Annotated, cast

import typer

from mlora.cli.common import AsJson, RunDir, command
from mlora.cli.tables import print_lines, print_rows
from mlora.errors import RunError

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="tasks of the run")]


def status(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show how far a run has come and what waits in its queue.

    Works while the run trains and afterwards.
    """
    with command():
        from mlora.cli.run_status import read_status

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
            help="a file per task: an adapter's keys (name, dataset, lora, ...) and datasets new to the run",
        ),
    ],
) -> None:
    """Add tasks to a run, while it trains or afterwards."""
    with command():
        from mlora.store.requests import submit

        print_lines(submit(run_dir, tasks))


CHANGES = {
    "cancel": "End tasks of a run for good. Their weights are not kept.",
    "pause": "Pause tasks of a run until you unpause them.\n\nOther tasks use their memory in the meantime.",
    "unpause": "Continue paused tasks of a run where they stopped.",
}
"""Help of the commands that `change_tasks` carries out, by their names."""


def change_tasks(context: typer.Context, run_dir: RunDir, names: Names) -> None:
    """Carries out the command of `CHANGES` that the user gave."""
    with command():
        from mlora.store.requests import Change, change

        print_lines(change(run_dir, cast(Change, context.info_name), names))


def stop(
    run_dir: RunDir,
    names: Names,
    keep: Annotated[bool, typer.Option("--keep", help="keep the weights, in adapters/NAME")] = False,
) -> None:
    """End tasks of a run now and keep their weights.

    They end at the run's next iteration, as if they had finished. Needs --keep; `mlora cancel` keeps nothing.
    """
    with command():
        from mlora.store.requests import change

        if not keep:
            run, tasks = run_dir, " ".join(names)
            raise RunError(
                f"stop keeps the weights: give --keep; to end without them, use `mlora cancel {run} {tasks}`"
            )
        print_lines(change(run_dir, "stop", names))
