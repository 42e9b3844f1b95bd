"""``mlora simulate``; registered by `mlora.cli.app`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mlora.cli.common import command
from mlora.cli.tables import print_lines, print_rows
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
            help="lorapp: the number of groups that run at once; a group is one adapter, or several that "
            "share batches, as `mlora train` makes of more than 2 * stages adapters; 1f1b, gpipe: the "
            "adapters of one batch [from --times, else 4]",
        ),
    ] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="micro-batches in each optimizer step")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of each adapter")] = 20,
    forward: Annotated[
        str | None,
        typer.Option(
            metavar="MS[,MS...]",
            help="forward time of a micro-batch in ms: one value, or one for each stage [1]",
        ),
    ] = None,
    backward: Annotated[
        str | None, typer.Option(metavar="MS[,MS...]", help="backward time, in the same form [1]")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(metavar="MS", help="latency in ms between neighbouring stages [0]")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="GBIT/S", help="each way between neighbouring stages [unlimited]")
    ] = None,
    message_bytes: Annotated[
        float | None, typer.Option("--bytes", help="bytes sent for each micro-batch")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(min=1, help="hidden size; instead of --bytes, send hidden * rows * itemsize")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="tokens in a micro-batch [1]")] = None,
    itemsize: Annotated[int | None, typer.Option(min=1, help="bytes of each number [2]")] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, help="lorapp: most micro-batches in flight at once [adapters * micro-batches, as in a run]"
        ),
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            help="a times.json that `mlora train --trace` wrote: use its times and number of groups"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write a picture of the timeline: a PNG file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object")] = False,
) -> None:
    """Predict what a pipeline does, without running it.

    Prints bubbles, throughput and micro-batches in flight.
    """
    given = locals()
    with command():
        from mlora.simulate.forecast import Options, forecast

        if out is not None and out.suffix.lower() != ".png":
            raise RunError(f"--out: expected the name of a .png file, got {str(out)!r}")
        found = forecast(Options(**{name: given[name] for name in Options.__annotations__}))
        if out is not None:
            found.draw(out)
        if as_json:
            print(json.dumps(found.as_json()))
            return
        print_lines(found.lines())
        print_rows(found.table())
