"""``mlora schema``, registered by `mlora.cli.app`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlora.cli.common import command


class File(StrEnum):
    """The files that have a schema."""

    run = "run"
    submission = "submission"


def schema(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write it to this file; default: print it")
    ] = None,
    of: Annotated[
        File,
        typer.Option(
            metavar="NAME", help="run: a run's YAML; submission: a task's file, as `mlora submit` takes it"
        ),
    ] = File.run,
) -> None:
    """Print the JSON schema of a run's YAML.

    Editors complete keys by it.
    """
    with command():
        from mlora.config.schema import run_schema, submission_schema

        text = json.dumps(run_schema() if of is File.run else submission_schema(), indent=2)
        if output is None:
            print(text)
            return
        from mlora.store.disk import write_file

        write_file(output, f"{text}\n".encode())
        print(f"{output}: name it in a file's first line: # yaml-language-server: $schema={output}")
