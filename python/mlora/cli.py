"""The command ``mlora``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlora.errors import RunError
from mlora.imports import end_imports_at_once, no_collection
from mlora.output import guarded_output

if TYPE_CHECKING:
    from mlora.config import RunConfig
    from mlora.report import Reporter
    from mlora.result import RunResult
    from mlora.stages import Member

app = typer.Typer(
    help="Train many LoRA adapters together over one frozen base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # frames around errors wrap paths
)

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's config")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run's output_dir")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="tasks of the run")]
Overwrite = Annotated[bool, typer.Option(help="replace an earlier run in output_dir")]
Stages = Annotated[
    int | None,
    typer.Option(min=1, metavar="K", help="cut the model over K processes, as --set pipeline.stages=K does"),
]
Trace = Annotated[
    bool,
    typer.Option("--trace", help="write what the stages did when: trace.json, timeline.png, times.json"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="override the config: adapters.sums-r8.learning_rate=1e-3"
    ),
]


def main() -> None:
    """Run the command line."""
    end_imports_at_once()
    app()


@app.command()
def train(
    run: RunFile,
    set_: Overrides = None,
    overwrite: Overwrite = False,
    stages: Stages = None,
    trace: Trace = False,
) -> None:
    """Train every adapter of RUN.yaml together."""
    start("train", run, set_, overwrite=overwrite, stages=stages, trace=trace)


@app.command()
def sweep(
    run: RunFile,
    set_: Overrides = None,
    overwrite: Overwrite = False,
    stages: Stages = None,
    trace: Trace = False,
) -> None:
    """Search for the best hyperparameters: trials are adapters that train together."""
    start("sweep", run, set_, overwrite=overwrite, stages=stages, trace=trace)


def start(
    name: str, run: Path, set_: list[str] | None, *, overwrite: bool, stages: int | None, trace: bool
) -> None:
    """Begin a new run, as the commands `train` and `sweep` do.

    Args:
        name: of the command.
        run: the run's YAML.
        set_: overrides.
        overwrite: an earlier run may be replaced.
        stages: into how many the model is cut.
        trace: write what they did when.
    """
    with command(goes_on=True):
        from mlora.config_file import load_config

        given = [setting for setting in set_ or [] if setting.startswith("pipeline.stages=")]
        if stages and given and given[-1] != f"pipeline.stages={stages}":
            raise RunError(f"--stages {stages}: --set {given[-1]} says something else; give one of them")
        settings = [*(set_ or []), *([f"pipeline.stages={stages}"] if stages else [])]
        config = load_config(run, settings)
        if (config.sweep is not None) != (name == "sweep"):
            what = "holds a sweep" if config.sweep else "holds no sweep"
            raise RunError(f"{run}: {what}; start it with `mlora {'sweep' if config.sweep else 'train'}`")
        overrides = [word for setting in settings for word in ("--set", setting)]
        flags = [*(["--overwrite"] if overwrite else []), *(["--trace"] if trace else [])]
        start_stages(config, [name, str(run), *overrides, *flags], overwrite=overwrite)
        begin()
        from mlora.run import train

        run_here(
            config,
            lambda member: train(
                config, overwrite=overwrite, reporter=reporter(), member=member, trace=trace
            ),
            trace=trace,
        )


@app.command()
def resume(run_dir: RunDir) -> None:
    """Continue a run from its last checkpoint."""
    with command(goes_on=True):
        from mlora.run_folder import RunFolder

        config = RunFolder(run_dir.resolve()).read_config()  # its faults need not wait for torch
        start_stages(config, ["resume", str(run_dir)])
        begin()
        from mlora.run import resume

        run_here(config, lambda member: resume(run_dir, reporter=reporter(), member=member))


@app.command()
def validate(run: RunFile, set_: Overrides = None) -> None:
    """Check a config, its data, its base model and its adapters; train nothing and write nothing."""
    with command():
        from mlora.config_file import load_config

        config = load_config(run, set_ or [])
        begin()
        from mlora.prepare import validate
        from mlora.report import PlainLines

        lines = PlainLines()
        prepared, plan = validate(config, lines)
        roster = prepared.roster
        lines.start(roster.tasks)
        if plan:
            print_rows(plan.table())
            for line in plan.lines():
                print(line)
            for task in plan.never:
                lines.fault(f"{task.name}: refused: {task.verdict}")
            roster.refused |= {task.name: task.verdict for task in plan.never}
        if roster.refused:
            raise RunError(
                f"{run}: {len(roster.refused)} of {len(prepared.config.adapters)} adapters would be refused"
            )
        if config.sweep:
            places = f"{config.sweep.count} trials, {config.at_once} at once"
            print(f"{run}: a sweep of {places}; {len(roster.tasks)} samples of its search space are ready")
        else:
            print(f"{run}: {len(roster.tasks)} adapters are ready to train")


@app.command()
def status(
    run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False
) -> None:
    """Show how far a run has come and what waits in its queue, from its files."""
    with command():
        from mlora.status import read_status

        found = read_status(run_dir)
        if as_json:
            print(json.dumps(found.as_json()))
            return
        print(found.line)
        print_rows(found.table())
        print_lines(found.notes())


@app.command()
def submit(
    run_dir: RunDir,
    tasks: Annotated[
        list[Path],
        typer.Argument(
            metavar="TASK.yaml...", help="what stands below adapters for one task, and its datasets"
        ),
    ],
) -> None:
    """Give a run further tasks, while it trains or afterwards."""
    with command():
        from mlora.requests import submit

        print_lines(submit(run_dir, tasks))


@app.command()
def cancel(run_dir: RunDir, names: Names) -> None:
    """End tasks of a run for good; what they have learned is not kept."""
    with command():
        from mlora.requests import change

        print_lines(change(run_dir, "cancel", names))


@app.command()
def pause(run_dir: RunDir, names: Names) -> None:
    """Set tasks of a run aside until they are unpaused; their memory is free for others."""
    with command():
        from mlora.requests import change

        print_lines(change(run_dir, "pause", names))


@app.command()
def unpause(run_dir: RunDir, names: Names) -> None:
    """Let paused tasks of a run go on where they were."""
    with command():
        from mlora.requests import change

        print_lines(change(run_dir, "unpause", names))


@app.command()
def generate(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="a run's output_dir or a PEFT adapter folder")
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="a prompt; may be repeated")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="a jsonl file of objects with 'prompt', or a text file of one prompt a line"),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter", "-a", help="an adapter of the run, or __base__; may be repeated; default: all"
        ),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="the base model; default: the one that SOURCE names")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token each time")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 draws from all tokens")] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    chat: Annotated[
        bool, typer.Option(help="each prompt is a user's message, put into the base model's chat template")
    ] = False,
    bf16: Annotated[bool, typer.Option(help="load the base model in bf16")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:<index>")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="print JSON objects")] = False,
) -> None:
    """Complete each prompt with each adapter, all in one batch."""
    with command():
        begin()
        from mlora.generate import Sampling
        from mlora.serve import answer, print_answers, read_prompts

        texts = read_prompts(prompt or [], prompts)
        try:
            sampling = Sampling(temperature, top_p, top_k)
        except ValueError as error:
            raise RunError(str(error)) from error
        answers = answer(
            source,
            texts,
            adapters=adapter,
            base_model=base_model,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            chat=chat,
            bf16=bf16,
            device=device,
        )
        print_answers(answers, as_json=json_lines, between=" | " if chat else "")


@app.command()
def simulate(
    schedule: Annotated[str, typer.Option(help="lorapp, 1f1b or gpipe")] = "lorapp",
    stages: Annotated[
        int | None, typer.Option(min=1, max=4096, help="default: as many as --forward has values, else 4")
    ] = None,
    adapters: Annotated[
        int,
        typer.Option(
            min=1,
            help="streams of lorapp: adapters, or groups that share batches, as mlora train makes of more "
            "than 2 * stages; 1f1b and gpipe run all adapters as one batch",
        ),
    ] = 4,
    micro_batches: Annotated[int, typer.Option(min=1, help="of each optimizer step")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of each adapter")] = 20,
    forward: Annotated[
        str | None, typer.Option(metavar="MS[,MS...]", help="of a micro-batch: one, or each stage's [1]")
    ] = None,
    backward: Annotated[str | None, typer.Option(metavar="MS[,MS...]", help="the same [1]")] = None,
    latency: Annotated[float | None, typer.Option(metavar="MS", help="between neighbours [0]")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="GBIT/S", help="of each direction between neighbours [any]")
    ] = None,
    message_bytes: Annotated[float | None, typer.Option("--bytes", help="sent for a micro-batch")] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="instead of --bytes: hidden * rows * itemsize")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="tokens of a micro-batch [1]")] = None,
    itemsize: Annotated[int | None, typer.Option(min=1, help="bytes of a number [2]")] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, help="the most micro-batches at once, for lorapp [adapters * micro-batches, as in a run]"
        ),
    ] = None,
    times: Annotated[
        Path | None, typer.Option(help="measured times of stages and links: times.json of train --trace")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write a picture of the timeline: a PNG file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """Predict what a pipeline does, without running it: bubbles, throughput, micro-batches in flight."""
    with command():
        from mlora.forecast import Options, forecast

        if out is not None and out.suffix.lower() != ".png":
            raise RunError(f"--out: expected the name of a .png file, got {str(out)!r}")
        found = forecast(
            Options(
                schedule=schedule,
                stages=stages,
                adapters=adapters,
                micro_batches=micro_batches,
                steps=steps,
                forward=forward,
                backward=backward,
                latency=latency,
                bandwidth=bandwidth,
                message_bytes=message_bytes,
                hidden=hidden,
                rows=rows,
                itemsize=itemsize,
                in_flight=in_flight,
                times=times,
            )
        )
        if out is not None:
            found.draw(out)
        if as_json:
            print(json.dumps(found.as_json()))
            return
        for line in found.lines():
            print(line)
        print_rows(found.table())


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench(context: typer.Context) -> None:
    """Run the benchmarks of the source checkout; `mlora bench --help` tells more."""
    with command():
        from mlora.benchmarks import run_suite

        raise typer.Exit(run_suite(context.args))


@contextmanager
def command(*, goes_on: bool = False) -> Iterator[None]:
    """What every command does around its work: errors become lines, and so does output that goes away.

    Args:
        goes_on: the work goes on when standard output cannot be written.

    Raises:
        typer.Exit: after an error, or with 130 after an interrupt.
    """
    with errors_as_lines(), guarded_output(goes_on=goes_on), errors_as_lines():
        yield


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Turn an error that a user can mend into lines on standard error and exit code 1.

    Raises:
        typer.Exit: after such an error, or with 130 after an interrupt.
    """
    try:
        yield
    except RunError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def begin() -> None:
    """Load the operators, and keep the bars and notices of Transformers and the hub out of the output."""
    with no_collection():
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils import logging

        import mlora.engine  # noqa: F401 - with all that a model needs
        from mlora.device import load_operators

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    load_operators()


def reporter() -> Reporter:
    """Return a live table on a terminal, plain lines elsewhere."""
    from mlora.report import LiveTable, PlainLines

    return LiveTable() if sys.stdout.isatty() else PlainLines()


def start_stages(config: RunConfig, arguments: list[str], *, overwrite: bool | None = None) -> None:
    """Where a run has several stages and this is the user's process, run it in one process per stage.

    Args:
        config: the run's.
        arguments: the command line that each of them is given.
        overwrite: of a new run, whether an earlier one may be replaced; none where it goes on.

    Raises:
        RunError: it can be refused without starting them.
        typer.Exit: with the run's exit code, when they have ended.
    """
    if config.pipeline.processes == 1:
        return
    from mlora.early import check_early
    from mlora.launch import is_launched, launch
    from mlora.run_folder import RunFolder

    if is_launched():
        return
    if overwrite is not None:
        check_early(config, overwrite=overwrite)
    began = time.time()
    code = launch(config.pipeline.processes, ["-m", "mlora", *arguments])
    if code and RunFolder(config.output_dir).was_cut_off(since=began):
        print(f"continue with: mlora resume {config.output_dir}", file=sys.stderr)
    raise typer.Exit(code)


def run_here(config: RunConfig, lead: Callable[[Member | None], RunResult], *, trace: bool = False) -> None:
    """Run the stage that this process is there for.

    Args:
        config: the run's.
        lead: runs stage 0, or a run of one stage.
        trace: whether the other stages note what they do when.

    Raises:
        typer.Exit: with the run's exit code, unless this is a later stage.
    """
    from mlora.stages import membership, run_stage

    with membership(config) as member:
        if member and member.world.rank:
            run_stage(config, member, trace=trace)
            return
        result = lead(member)
    finish(result)


def finish(result: RunResult) -> None:
    """Print the table at the end of a run, and leave with its exit code.

    Args:
        result: what came of it.

    Raises:
        typer.Exit: with the exit code, always.
    """
    from mlora.result_table import result_table
    from mlora.run_folder import RunFolder
    from mlora.status import how_to_go_on
    from mlora.task_queue import has_news

    folder = RunFolder(result.output_dir)
    sweep = folder.read_config().sweep
    if sweep:
        from mlora.sweep.ranking import rank_trials, ranked_table

        print_rows(ranked_table(rank_trials(folder, sweep), sweep))
        if folder.best.is_dir():
            print(f"best: {folder.best}")
    else:
        print_rows(result_table(result.summary()))
    if result.status == "interrupted":
        print(f"interrupted; continue with: mlora resume {result.output_dir}")
    else:
        print(f"{result.status} in {result.seconds:.0f} s: {result.output_dir}")
        if has_news(folder.queue):
            print(f"more was asked for meanwhile; continue with: mlora resume {result.output_dir}")
        elif result.status == "paused":
            paused = [name for name, adapter in result.adapters.items() if adapter.state == "paused"]
            print(f"all that is left is paused; continue with {how_to_go_on(result.output_dir, paused)}")
    raise typer.Exit(result.exit_code)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are."""
    for line in lines:
        print(line)


def print_rows(rows: list[list[str]]) -> None:
    """Print rows as a table on a terminal, as aligned lines elsewhere.

    Args:
        rows: the first one holds the titles.
    """
    from mlora.result_table import aligned

    if not sys.stdout.isatty():
        print(aligned(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column, title in enumerate(rows[0]):
        table.add_column(title, justify="left" if column < 2 else "right")
    for row in rows[1:]:
        table.add_row(*row)
    Console(highlight=False).print(table)
