"""``mlora simulate``; registered by `mlora.cli`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mlora.commands.common import command, print_rows
from mlora.errors import RunError


def simulate(
    schedule: Annotated[str, typer.Option(help="lorapp, 1f1b or gpipe")] = "lorapp",
    stages: Annotated[
        int | None, typer.Option(min=1, max=4096, help="default: as many as --forward has values, else 4")
    ] = None,
    adapters: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="streams of lorapp: adapters, or groups that share batches, as mlora train makes of more "
            "than 2 * stages; 1f1b and gpipe run all adapters as one batch [as in --times, else 4]",
        ),
    ] = None,
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
        Path | None,
        typer.Option(
            help="measured times of stages and links, and how many streams: times.json of train --trace"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write a picture of the timeline: a PNG file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """Predict what a pipeline does, without running it: bubbles, throughput, micro-batches in flight."""
    with command():
        from mlora.timelines.forecast import Options, forecast

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
