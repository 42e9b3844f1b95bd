"""``mlora data``; registered by `mlora.cli.app`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlora.cli.common import command
from mlora.cli.output import terminal
from mlora.errors import visible

if TYPE_CHECKING:
    from mlora.run.shown_data import ShownData, ShownSequence

data = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@data.callback()
def about() -> None:
    """Look at the data of a run."""


@data.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's config")],
    adapters: Annotated[
        list[str] | None, typer.Argument(metavar="[ADAPTER]...", help="whose data; default: of all")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="samples of each dataset, the first ones")] = 3,
    held_out: Annotated[
        bool, typer.Option("--eval", help="show eval_dataset, not what is trained on")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print an object for each sequence: ids, labels, text")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a key of the config")
    ] = None,
) -> None:
    """Print samples as they are trained, with the trained tokens marked.

    Trained text stands in ⟦ ⟧; on a terminal it is green and underlined instead.
    """
    with command():
        from mlora.cli.common import begin
        from mlora.config.config_file import load_config

        config = load_config(run, set_ or [])
        begin(quantized=False)  # before the libraries are imported, whose notices it silences
        from mlora.run.shown_data import shown_data

        found = shown_data(config, adapters or (), count=samples, held_out=held_out, warn=_warn)
        if as_json:
            _print_json(found)
            return
        for number, each in enumerate(found):
            _print(each, first=not number)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


def _print_json(found: Iterable[ShownData]) -> None:
    for each in found:
        for sequence in each.sequences:
            print(json.dumps({"adapters": each.adapters, "dataset": each.dataset, **asdict(sequence)}))


def _print(data: ShownData, *, first: bool) -> None:
    names = ", ".join(data.adapters)
    head = f"{names}: dataset {data.dataset}, {data.samples} samples, {data.tokens} tokens"
    print(head if first else f"\n{head}")
    for sequence in data.sequences:
        print(f"\n{sequence.title}")
        _print_text(sequence)


def _print_text(sequence: ShownSequence) -> None:
    spans = [(visible(text), marked) for text, marked in sequence.spans]
    if not sys.stdout.isatty():
        print("".join(f"⟦{text}⟧" if marked else text for text, marked in spans))
        return
    from rich.console import Console
    from rich.text import Text

    styled = [(text, "green underline" if marked else "") for text, marked in spans]
    Console(file=terminal(), highlight=False).print(Text.assemble(*styled), soft_wrap=True)
