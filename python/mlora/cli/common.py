"""What commands share: errors as lines, and a run in this process or in one process per stage."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlora.cli.output import guarded_output
from mlora.cli.tables import print_lines, print_rows, result_table
from mlora.cluster.imports import no_collection
from mlora.errors import RunError, visible
from mlora.regular_files import read_regular

if TYPE_CHECKING:
    from mlora.config.run_config import RunConfig
    from mlora.run.reporter import Reporter
    from mlora.run.stages import Member
    from mlora.tasks.result import RunResult

ONE_STAGE = "use one stage"
"""How refusals end that hold over several stages only."""
NOTICES = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community",
}
"""How lines begin that are silenced where nothing is quantised, by the loggers that write them.

Transformers imports torchao, and PEFT bitsandbytes, wherever they are installed.
"""

RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="the run's output_dir")]
AsJson = Annotated[bool, typer.Option("--json", help="print a JSON object")]


@contextmanager
def command(*, goes_on: bool = False) -> Iterator[None]:
    """Wraps every command: faults become lines. `goes_on`: unwritable output does not stop the work."""
    with errors_as_lines(), guarded_output(goes_on=goes_on), errors_as_lines():
        yield


@contextmanager
def errors_as_lines() -> Iterator[None]:
    """Prints a RunError on standard error and exits with 1; exits with 130 after Ctrl-C."""
    try:
        yield
    except RunError as error:
        for line in str(error).rstrip("\n").split("\n"):
            print(f"error: {visible(line)}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


def quantizes(config: RunConfig) -> bool:
    """Whether a run's base is quantised: as the config asks, or in its files."""
    return config.quantization is not None or quantized_files(config.base_folder)


def quantized_files(base: Path | str) -> bool:
    """Whether a base model's files say that it is quantised; False for one that is not in a folder."""
    with suppress(OSError):
        return "quantization_config" in read_regular(Path(base) / "config.json", errors="replace")
    return False


def begin(*, quantized: bool) -> None:
    """Loads the operators, and silences the progress bars and notices of Transformers and the hub.

    Unless the base is `quantized`, notices of the libraries for that are silenced, too.
    """
    for name, start in NOTICES.items() if not quantized else ():
        logging.getLogger(name).addFilter(partial(_unlike, start))
    with no_collection():
        from huggingface_hub.utils import logging as hub_logging
        from transformers.utils import logging as their_logging

        import mlora.engine.engine  # noqa: F401 - with all that a model needs
        from mlora.cluster.device import load_operators

    hub_logging.set_verbosity_error()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    load_operators()


def _unlike(start: str, record: logging.LogRecord) -> bool:
    """Whether a record is to be written: it begins otherwise."""
    return not str(record.msg).startswith(start)


def reporter() -> Reporter:
    """Returns a live table on a terminal, plain lines elsewhere."""
    from mlora.cli.live_table import LiveTable
    from mlora.run.reporter import PlainLines

    return LiveTable() if sys.stdout.isatty() else PlainLines()


def start_stages(config: RunConfig, arguments: list[str], *, overwrite: bool | None = None) -> None:
    """Runs a run of several stages in one process per stage, then exits with the run's exit code.

    Returns at once for a run of one process, and in a process that a launcher has started. `overwrite` is
    None when a run is resumed.
    """
    if config.pipeline.processes == 1:
        return
    from torch.distributed import is_torchelastic_launched

    from mlora.cluster.launch import launch
    from mlora.run.preflight import check_early
    from mlora.store.run_folder import RunFolder

    if is_torchelastic_launched():
        return
    if overwrite is not None:
        check_early(config, overwrite=overwrite)
    began = time.time()
    code = launch(config.pipeline.processes, ["-m", "mlora", *arguments])
    if code and RunFolder(config.output_dir).was_cut_off(since=began):
        print(f"continue with: mlora resume {config.output_dir}", file=sys.stderr)
    raise typer.Exit(code)


def run_here(config: RunConfig, lead: Callable[[Member | None], RunResult], *, trace: bool = False) -> None:
    """Runs this process's stage. Stage 0 calls `lead`, then exits with the run's exit code."""
    from mlora.run.stages import membership, run_stage

    with membership(config) as member:
        if member and member.world.rank:
            run_stage(config, member, trace=trace)
            return
        result = lead(member)
    finish(result)


def finish(result: RunResult) -> None:
    """Prints the table at the end of a run and exits with the run's exit code."""
    from mlora.store.queue import has_news
    from mlora.store.run_folder import RunFolder

    folder = RunFolder(result.output_dir)
    sweep = folder.read_config().sweep
    if sweep:
        from mlora.sweep.ranking import rank_trials, ranked_table

        trials = rank_trials(folder, sweep)
        print_rows(ranked_table(trials, sweep))
        others = result.adapters.keys() - {trial.name for trial in trials}
        if others:
            left = {name: adapter for name, adapter in result.adapters.items() if name in others}
            print_rows(result_table(replace(result, adapters=left).summary()))
        if folder.best.is_dir():
            print(f"best: {folder.best}")
    else:
        print_rows(result_table(result.summary()))
    if result.status == "interrupted":
        print(f"interrupted; continue with: mlora resume {result.output_dir}")
    else:
        print(f"{result.status} in {result.seconds:.0f} s: {result.output_dir}")
        if not sweep:
            print_lines(how_to_train_again(result))
        if has_news(folder.queue):
            print(f"new requests came meanwhile; take them with: mlora resume {result.output_dir}")
        elif result.status == "paused":
            paused = [name for name, adapter in result.adapters.items() if adapter.state == "paused"]
            print(f"only paused tasks remain; continue with {how_to_go_on(result.output_dir, paused)}")
    raise typer.Exit(result.exit_code)


def how_to_train_again(result: RunResult) -> list[str]:
    """Returns a line on what to do about adapters that were refused or stopped, if there are any."""
    ended = [adapter for adapter in result.adapters.values() if adapter.state in ("refused", "stopped")]
    if not ended:
        return []
    kinds = " or ".join(sorted({adapter.state for adapter in ended}))
    submit, resume = f"mlora submit {result.output_dir} TASK.yaml", f"mlora resume {result.output_dir}"
    if any(ONE_STAGE in adapter.message for adapter in ended):
        resume += " --set pipeline.stages=1"
    line = (
        f"to train a {kinds} adapter after all, correct what its error names, give it another name and "
        f"submit it: `{submit}`, then `{resume}`"
    )
    stopped = [adapter for adapter in ended if adapter.state == "stopped"]
    if any(adapter.saved_step is None for adapter in stopped):
        line += "; it begins anew: no weights of a stopped adapter are kept"
        line += ", but those of its best evaluation" if any(a.saved_step for a in stopped) else ""
    return [line]


def how_to_go_on(path: Path, paused: list[str]) -> str:
    """Returns the commands that continue a run with paused tasks only."""
    return f"`mlora unpause {path} {' '.join(paused)}`, then `mlora resume {path}`"
