"""``mlora report``; registered by `mlora.cli.app`."""

from pathlib import Path
from typing import Annotated

import typer

from mlora.cli.common import RunDir, command


def report(
    run_dir: RunDir,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="where to write it; default: report.html in RUN_DIR"),
    ] = None,
) -> None:
    """Write one HTML page about a run: curves, results, samples, memory.

    Works while the run trains and afterwards. The page needs no network.
    """
    with command():
        from mlora.cli.run_status import read_status
        from mlora.files.disk import write_file
        from mlora.report.page import render
        from mlora.report.read import read_run

        found = read_status(run_dir)
        page = render(read_run(found.folder, found.as_json(), found.line))
        path = (output or found.folder.report).resolve()
        write_file(path, page.encode())
        print(f"report: {path}")
