"""The command ``mlora``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from enum import StrEnum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer

from mlora.cli.common import RunDir, begin, command, quantizes, reporter, run_here, start_stages
from mlora.cli.data import data
from mlora.cli.generate import generate
from mlora.cli.handoff import evaluate, export, merge
from mlora.cli.queue import CHANGES, change_tasks, status, stop, submit
from mlora.cli.report import report
from mlora.cli.simulate import simulate
from mlora.cli.tables import print_lines, print_rows
from mlora.cluster.imports import end_imports_at_once
from mlora.errors import RunError

PACKAGE, CHECKOUT = Path(__file__).resolve().parents[1], Path(__file__).resolve().parents[3]
BENCHMARKS = CHECKOUT / "bench"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # frames around errors wrap paths
)


class File(StrEnum):
    """The files that have a schema."""

    run = "run"
    submission = "submission"


RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's config")]
Overwrite = Annotated[bool, typer.Option(help="replace an earlier run in output_dir")]
Stages = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="K", help="cut the model into K stages, one process each; as --set pipeline.stages=K"
    ),
]
Trace = Annotated[
    bool,
    typer.Option("--trace", help="write what each stage did and when: trace.json, times.json"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="override a key of the config, for example adapters.sums-r8.learning_rate=1e-3; may be repeated",
    ),
]


def with_set(settings: Sequence[str]) -> list[str]:
    """Returns the words of a command line that give these overrides."""
    return [word for setting in settings for word in ("--set", setting)]


def print_version(wanted: bool) -> None:
    """Prints the version and exits, if `--version` was given."""
    if not wanted:
        return
    with command():
        try:
            found = version("mlora-ext")
        except PackageNotFoundError as error:
            raise RunError("the version is unknown: mlora-ext is not installed") from error
        print(f"mlora-ext {found}")
    raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Train many LoRA adapters together over one frozen base model."""


def main() -> None:
    """Runs the command line."""
    end_imports_at_once()
    app()


@app.command("sweep", help="Search hyperparameters: trials are adapters that train together.")
@app.command("train", help="Train every adapter of RUN.yaml together.")
def start(
    context: typer.Context,
    run: RunFile,
    set_: Overrides = None,
    overwrite: Overwrite = False,
    stages: Stages = None,
    trace: Trace = False,
) -> None:
    """Starts a new run."""
    name = str(context.info_name)
    with command(goes_on=True):
        from mlora.config.config_file import load_config

        given = [setting for setting in set_ or [] if setting.startswith("pipeline.stages=")]
        if stages and given and given[-1] != f"pipeline.stages={stages}":
            raise RunError(f"--stages {stages} and --set {given[-1]} differ; give only one of them")
        settings = [*(set_ or []), *([f"pipeline.stages={stages}"] if stages else [])]
        config = load_config(run, settings)
        if (config.sweep is not None) != (name == "sweep"):
            what = "holds a sweep" if config.sweep else "holds no sweep"
            raise RunError(f"{run}: {what}; start it with `mlora {'sweep' if config.sweep else 'train'}`")
        flags = [*(["--overwrite"] if overwrite else []), *(["--trace"] if trace else [])]
        start_stages(config, [name, str(run), *with_set(settings), *flags], overwrite=overwrite)
        begin(quantized=quantizes(config))
        from mlora.run.run import train

        run_here(
            config,
            lambda member: train(
                config, overwrite=overwrite, reporter=reporter(), member=member, trace=trace
            ),
            trace=trace,
        )


@app.command()
def resume(run_dir: RunDir, set_: Overrides = None) -> None:
    """Continue a run from its last checkpoint."""
    with command(goes_on=True):
        from mlora.run.resumed_config import resumed_config
        from mlora.store.run_folder import RunFolder

        settings, folder = set_ or [], RunFolder(run_dir.resolve())
        config = resumed_config(folder, settings)  # reports a fault before torch is loaded
        start_stages(config, ["resume", str(run_dir), *with_set(settings)])
        begin(quantized=quantizes(config))
        from mlora.run.run import resume

        run_here(
            config,
            lambda member: resume(run_dir, reporter=reporter(), member=member, settings=settings),
        )


@app.command()
def validate(
    run: RunFile,
    set_: Overrides = None,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="also import and try losses and callbacks of one's own")
    ] = False,
) -> None:
    """Check a config, its data, its base model and its adapters.

    Trains nothing and writes nothing.
    """
    with command():
        from mlora.config.config_file import load_config

        config = load_config(run, set_ or [])
        begin(quantized=quantizes(config))
        from mlora.run.reporter import PlainLines
        from mlora.run.validation import validate

        lines = PlainLines()
        prepared, plan, placement, quantized = validate(config, lines, run_code=run_code)
        table = prepared.table
        lines.start(table.tasks)
        if quantized:
            print(quantized)
        if placement:
            print_rows(placement.table())
            print_lines(placement.lines())
        if plan:
            print_rows(plan.table())
            print_lines(plan.lines())
            for task in plan.never:
                lines.fault(f"{task.name}: refused: {task.verdict}")
            table.refused |= {task.name: task.verdict for task in plan.never}
        if table.refused:
            what = "sampled trials" if config.sweep else "adapters"
            count = f"{len(table.refused)} of {len(prepared.config.adapters)}"
            raise RunError(f"{run}: {count} {what} would be refused")
        if config.sweep:
            places = f"{config.sweep.count} trials, {config.at_once} at once"
            samples = len(table.tasks)
            ready = "1 sample trial is" if samples == 1 else f"{samples} sample trials are"
            print(f"{run}: a sweep of {places}; {ready} ready to train")
        else:
            ready = "1 adapter is" if len(table.tasks) == 1 else f"{len(table.tasks)} adapters are"
            print(f"{run}: {ready} ready to train")


app.command()(status)
app.command()(submit)
for name, what in CHANGES.items():
    app.command(name, help=what)(change_tasks)
app.command()(stop)


app.command()(report)
app.command()(generate)
app.add_typer(data, name="data")


@app.command()
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


app.command()(evaluate)
app.command()(export)
app.command()(merge)


@app.command()
def examples(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="a new folder; default: examples")] = Path(
        "examples"
    ),
) -> None:
    """Write the examples into a new folder.

    Their data and their tiny base model are among them.
    """
    with command():
        copy_examples(folder)
        print(f"{folder}: written; its README.md lists the examples")
        print(f"to begin: mlora train {folder / 'quickstart.yaml'}")


def copy_examples(folder: Path) -> None:
    """Copies the examples of the package, or of the source checkout, into a new or empty folder.

    Raises RunError if the folder holds files or cannot be written.
    """
    source = (PACKAGE if (PACKAGE / "examples").is_dir() else CHECKOUT) / "examples"
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise RunError(f"{folder}: is not empty; give a new folder")
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    except shutil.Error as error:
        raise RunError(f"{folder}: cannot be written: {error.args[0][0][2]}") from error
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {error.strerror}") from error


app.add_typer(simulate, name="simulate")


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench(context: typer.Context) -> None:
    """Run the benchmarks of the source checkout."""
    with command():
        if not (BENCHMARKS / "__main__.py").is_file():
            raise RunError(
                "bench: the installed package holds no benchmarks; in a source checkout, run "
                "`pip install --no-build-isolation -e .`"
            )
        if str(BENCHMARKS) not in sys.path:
            sys.path.insert(0, str(BENCHMARKS))
        raise typer.Exit(int(import_module("microbench.command").main(context.args, program="mlora bench")))
