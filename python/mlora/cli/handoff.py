"""``mlora export``, ``merge`` and ``evaluate``; registered by `mlora.cli.app`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlora.cli.common import AsJson, RunDir, begin, command, quantizes
from mlora.cli.tables import print_lines, print_rows

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="an adapter of the run")]
Checkpoint = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="the number in the name of a checkpoint; default: the weights that the adapter ended with, or "
        "those of the newest checkpoint",
    ),
]


def _begin(run_dir: Path) -> None:
    """Loads the operators; reports a folder without a run before."""
    from mlora.store.run_folder import RunFolder

    begin(quantized=quantizes(RunFolder(run_dir.resolve()).read_config()))


def export(
    run_dir: RunDir,
    adapter: Adapter,
    checkpoint: Checkpoint = None,
    portable: Annotated[
        bool,
        typer.Option("--portable", help="one rank, scaling folded in: for vLLM, SGLang and llama.cpp"),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="the new folder; default: exports/ADAPTER[-portable] in RUN_DIR"),
    ] = None,
) -> None:
    """Write an adapter of a run as a PEFT folder.

    With tokenizer and model card. Works while the run trains, too. Prints the command lines of servers.
    """
    with command():
        _begin(run_dir)
        from mlora.run.handoff.export import export_adapter

        done = export_adapter(run_dir, adapter, checkpoint=checkpoint, portable=portable, output=output)
        print(f"exported: {done.folder} ({done.weights.told})")
        print_lines(done.served)
        for line in done.warnings:
            print(f"warning: {line}", file=sys.stderr)


def merge(
    run_dir: RunDir,
    adapter: Adapter,
    output: Annotated[Path, typer.Option(metavar="DIR", help="the new folder")],
    checkpoint: Checkpoint = None,
) -> None:
    """Write the base model with an adapter in its weights.

    The result is a Transformers folder. Works while the run trains, too.
    """
    with command():
        _begin(run_dir)
        from mlora.run.handoff.merge import merge_adapter

        done = merge_adapter(run_dir, adapter, output, checkpoint=checkpoint)
        print(f"merged: {done.folder} ({done.weights.told})")
        print_lines(done.notes)


def evaluate(
    run_dir: RunDir,
    adapters: Annotated[
        list[str] | None, typer.Argument(metavar="[ADAPTER]...", help="adapters of the run; default: all")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="a dataset of the run; default: each adapter's eval_dataset"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="a file with samples, instead of --dataset")
    ] = None,
    data_format: Annotated[
        str | None,
        typer.Option("--format", help="the format of FILE; default: read as the adapter's dataset"),
    ] = None,
    checkpoint: Checkpoint = None,
    exact_match: Annotated[
        bool | None,
        typer.Option(
            help="also the share of prompts completed exactly, if the data has prompts; default: yes, but of "
            "chats only for adapters with eval_exact_match"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure adapters of a run and its base model on a dataset.

    Losses, metrics and exact match. Works while the run trains, too.
    """
    with command():
        _begin(run_dir)
        from mlora.run.handoff.evaluate import DataChoice, evaluate_adapters

        choice = DataChoice(dataset, data, data_format, exact_match)
        done = evaluate_adapters(run_dir, adapters or [], choice, checkpoint=checkpoint)
        if as_json:
            print(json.dumps(done.as_json(), indent=2))
            return
        print_lines(done.notes)
        print_rows(done.table())
        sys.stdout.flush()
