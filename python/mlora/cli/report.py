"""``mlora report``; registered by `mlora.cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlora.cli.common import RunDir, command

if TYPE_CHECKING:
    from mlora.report.read import Run


def report(
    run_dir: RunDir,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="where to write it; default: report.html in RUN_DIR"),
    ] = None,
) -> None:
    """Write one HTML page about a run.

    It has curves, results, samples and memory, and needs no network. Works while the run trains and
    afterwards.
    """
    with command():
        from mlora.report.page import render
        from mlora.store.disk import write_file
        from mlora.store.run_folder import RunFolder

        page = render(read(run_dir))
        path = output.resolve() if output else RunFolder(run_dir.resolve()).report  # which may be a link
        write_file(path, page.encode(errors="replace"))
        print(f"report: {path}")


def read(run_dir: Path) -> Run:
    """Reads what a report shows. Raises RunError if the folder holds no run or a file cannot be read."""
    from mlora.cli.run_status import read_status
    from mlora.config.sections import SchedulerConfig
    from mlora.report.read import read_run
    from mlora.tasks.result import columns_of

    found = read_status(run_dir)
    entries = found.adapters.values()
    metrics = [name for entry in entries for name in (*entry["eval_metrics"], *entry["metrics"])]
    limit = (found.config.get("scheduler") or {}).get("memory_limit")
    return read_run(
        found.folder,
        found.as_json(),
        line=found.line,
        config=found.config,
        fields=found.fields,
        limit=SchedulerConfig(memory_limit=limit).limit_bytes,
        shown=columns_of(dict.fromkeys(metrics)),
    )
