"""``mlora simulate``; registered by `mlora.cli.app`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mlora.cli.common import AsJson, command
from mlora.cli.tables import print_lines, print_rows
from mlora.errors import RunError

simulate = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@simulate.callback()
def simulate_pipeline(
    context: typer.Context,
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
    as_json: AsJson = False,
) -> None:
    """Predict what a pipeline does, without running it.

    Prints bubbles, throughput and micro-batches in flight. `mlora simulate offload` predicts the training of
    a model whose weights are on disk or in host memory.
    """
    given = locals()
    with command():
        if context.invoked_subcommand is not None:
            _refuse_options_before(context)
            return
        from mlora.simulate.forecast import PipelineOptions, forecast

        if out is not None and out.suffix.lower() != ".png":
            raise RunError(f"--out: expected the name of a .png file, got {str(out)!r}")
        found = forecast(PipelineOptions(**{name: given[name] for name in PipelineOptions.__annotations__}))
        if out is not None:
            found.draw(out)
        _print(found, as_json)


def _print(found: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_json()))
        return
    print_lines(found.lines())
    print_rows(found.table())


def _refuse_options_before(context: typer.Context) -> None:
    """Refuses options of the pipeline's forecast that stand before the name of another one."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = {"message_bytes": "bytes", "as_json": "json"}.get(name, name).replace("_", "-")
            raise RunError(
                f"--{option}: not an option of `mlora simulate offload`, or give it after `offload`"
            )


@simulate.command()
def offload(
    model: Annotated[str, typer.Option(help="llama-2-7b, llama-2-13b, llama-3-70b or qwen3-235b-a22b")],
    flops: Annotated[
        str, typer.Option(metavar="FLOPS", help="what the device reaches, for example 165TFLOPS")
    ],
    read: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="of the disk, for example 7GB/s; without it, the weights are in host memory"
        ),
    ] = None,
    write: Annotated[str | None, typer.Option(metavar="RATE", help="to the disk [as --read]")] = None,
    to_device: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="between host and device, each way; without it, device and host are one memory",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="of a batch, all adapters together [the largest power of two up to T* that fits]"
        ),
    ] = None,
    adapter_tokens: Annotated[int, typer.Option(min=1, help="that one adapter has in a batch")] = 1024,
    bytes_per_parameter: Annotated[
        float, typer.Option(help="of the weights that are streamed: 2 for bf16, 0.5 for nf4")
    ] = 2.0,
    method: Annotated[str, typer.Option(help="lora, or full: all weights are trained")] = "lora",
    slots: Annotated[int, typer.Option(min=2, help="blocks of weights on the device at once")] = 3,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="for example 24GB [unlimited]")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="[unlimited]")] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast the training of a model that does not fit into the device's memory.

    Prints how many tokens hide the streaming of the weights, what becomes of the activations, and tokens per
    second against the number of packed tokens. Nothing is measured.
    """
    given = locals()
    with command():
        from mlora.simulate.offload_forecast import ForecastOptions, forecast_offload

        if method not in ("lora", "full"):
            raise RunError(f"--method: expected lora or full, got {method!r}")
        found = forecast_offload(
            ForecastOptions(**{name: given[name] for name in ForecastOptions.__annotations__})
        )
        _print(found, as_json)
