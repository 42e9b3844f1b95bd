"""`mlora simulate offload`: how fast a model would train whose weights are on disk or in host memory."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlora.config.sections import parse_size
from mlora.errors import RunError
from mlora.offload.planner.machine import Budget, Machine
from mlora.offload.planner.search import PlannedActivations, plan_activations
from mlora.offload.planner.tokens_to_hide import Hidden, adapters_to_hide, tokens_of_passes, tokens_to_hide
from mlora.offload.planner.workload import OffloadWorkload, StatePlacement
from mlora.simulate.public_models import PUBLIC_MODELS, PublicModel

IO_SECONDS = 0.2e-9
"""Processor seconds for each byte read or written: measured as 0.12 to 0.3 a GB."""
UPDATE_SECONDS = 1.1e-9
"""Processor seconds of a fused AdamW for each parameter: measured as 108 ms for 96 million, one thread."""
CORES = 16
ROWS = 9
"""Numbers of tokens that are forecast: powers of two up to T* and beyond."""


@dataclass(frozen=True)
class ForecastOptions:
    """Options of the command; see its help. None = not given."""

    model: str
    flops: str
    read: str | None
    write: str | None
    to_device: str | None
    tokens: int | None
    adapter_tokens: int
    bytes_per_parameter: float
    method: Literal["lora", "full"]
    slots: int
    device_memory: str | None
    host_memory: str | None


@dataclass(frozen=True)
class Row:
    """The forecast for a number of packed tokens; `planned` is None if they do not fit into memory."""

    tokens: int
    adapters: int
    planned: PlannedActivations | None
    fault: str = ""

    def cells(self) -> list[str]:
        """Returns the cells of the command's table."""
        if self.planned is None:
            return [str(self.tokens), str(self.adapters), "", "", "", "", self.fault]
        time, plan = self.planned.time, self.planned.plan
        return [
            str(self.tokens),
            str(self.adapters),
            f"{time.tokens_per_second:.4g}",
            f"{time.seconds:.3g}",
            f"{time.compute_seconds / time.seconds:.0%}",
            time.bound,
            str(plan),
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns the row's content of `--json`."""
        found: dict[str, Any] = {"tokens": self.tokens, "adapters": self.adapters, "fits": not self.fault}
        if self.planned is None:
            return found | {"fault": self.fault}
        time = self.planned.time
        return found | {
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "compute_seconds": time.compute_seconds,
            "bound": time.bound,
            "forward_seconds": time.forward.seconds,
            "backward_seconds": time.backward.seconds,
            "optimizer_seconds": time.optimizer.seconds,
            "moved_bytes": time.moved_bytes,
            "inner": [str(choice) for choice in self.planned.plan.inner],
            "hidden": str(self.planned.plan.hidden),
            "case": str(self.planned.case),
            "device_bytes": self.planned.need.device,
            "host_bytes": self.planned.need.host,
        }


@dataclass(frozen=True)
class OffloadForecast:
    """What is forecast for a model on a machine, by the number of packed tokens."""

    options: ForecastOptions
    machine: Machine
    placement: StatePlacement
    model: PublicModel
    rule: float  # T* of the rule of thumb
    hidden: Hidden
    chosen: Row
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Returns the content of `--json`, in seconds, bytes and tokens."""
        return {
            "forecast": True,
            "options": asdict(self.options),
            "parameters": self.model.parameters,
            "tokens_to_hide": {"rule": self.rule, **asdict(self.hidden)},
            "adapters_to_hide": adapters_to_hide(self.hidden.tokens, self.options.adapter_tokens),
            "chosen": self.chosen.as_json(),
            "rows": [row.as_json() for row in self.rows],
        }

    def lines(self) -> list[str]:
        """Returns the lines that the command prints above its table."""
        options, hidden = self.options, self.hidden
        lines = [
            f"forecast, nothing here is measured: {options.model}, {self.model.parameters / 1e9:.1f} billion "
            f"parameters, method {options.method}, blocks streamed from {self.placement.base}",
            f"T*, where computing a block takes as long as bringing it: {self.rule:.0f} tokens by "
            f"the rule; with attention, head and {self.placement.slots} slots {hidden.forward:.0f} (forward) "
            f"and {hidden.backward:.0f} (backward)",
        ]
        if options.method == "lora":
            count = adapters_to_hide(hidden.tokens, options.adapter_tokens)
            lines.append(f"adapters of {options.adapter_tokens} tokens that hide the streaming: {count}")
        if self.chosen.planned is not None:
            planned = self.chosen.planned
            lines.append(
                f"plan for {self.chosen.tokens} tokens, head included: {planned.plan}; {planned.case}"
            )
            need = [f"{planned.need.device / 1e9:.1f} GB of the device"]
            need += [] if self.machine.one_memory else [f"{planned.need.host / 1e9:.1f} GB of the host"]
            lines.append(f"memory: {', '.join(need)}")
        return lines

    def table(self) -> list[list[str]]:
        """Returns a row of titles and one row for each number of tokens."""
        titles = ["tokens", "adapters", "tokens/s", "step s", "computing", "bound by", "plan"]
        rows = [titles, *(row.cells() for row in self.rows)]
        return rows if self.options.method == "lora" else [[row[0], *row[2:]] for row in rows]


def forecast_offload(options: ForecastOptions) -> OffloadForecast:
    """Forecasts a model's training; RunError names a wrong option in one line."""
    if options.model not in PUBLIC_MODELS:
        raise RunError(f"--model: expected one of {', '.join(PUBLIC_MODELS)}, got {options.model!r}")
    model, machine = PUBLIC_MODELS[options.model], _machine(options)
    base = "disk" if machine.has_disk else "host"
    optimizer = base if options.method == "full" else "host"
    placement = StatePlacement(base=base, optimizer=optimizer, slots=options.slots)  # type: ignore[arg-type]
    budget = Budget(_size(options, "device_memory"), _size(options, "host_memory"))
    bandwidth = min(machine.read or math.inf, machine.to_device)
    active = model.block_parameters(active=True) / model.block_parameters()
    rule = tokens_to_hide(options.bytes_per_parameter, machine.flops, bandwidth, active=active)
    hidden = tokens_of_passes(machine, _workload(options, model, 1024), placement)

    def row(tokens: int) -> Row:
        workload = _workload(options, model, tokens)
        adapters = adapters_to_hide(tokens, options.adapter_tokens)
        try:
            return Row(tokens, adapters, plan_activations(machine, workload, placement, budget))
        except ValueError as error:
            return Row(tokens, adapters, None, str(error))

    if options.tokens and (given := row(options.tokens)).planned is None:
        raise RunError(f"--tokens: {given.fault}")
    last = math.ceil(math.log2(max(rule, options.tokens or 1))) + 1
    counts = {2**power for power in range(max(0, last - ROWS), last + 1)}
    counts |= {options.tokens} if options.tokens else set()
    rows = [row(count) for count in sorted(counts)]
    fitting = [each for each in rows if each.planned is not None]
    shown = rows[: len(fitting) + 1]  # what does not fit once does not fit with more tokens
    if not fitting:
        raise RunError(f"{rows[0].tokens} tokens do not fit: {rows[0].fault}")
    enough = [each for each in fitting if each.tokens <= hidden.tokens] or fitting
    chosen = next((each for each in fitting if each.tokens == options.tokens), enough[-1])
    return OffloadForecast(options, machine, placement, model, rule, hidden, chosen, shown)


def _workload(options: ForecastOptions, model: PublicModel, tokens: int) -> OffloadWorkload:
    return model.workload(
        tokens,
        method=options.method,
        bytes_per_parameter=options.bytes_per_parameter,
        adapters=adapters_to_hide(tokens, options.adapter_tokens),
    )


def _machine(options: ForecastOptions) -> Machine:
    """Returns the machine of the options; without `--to-device`, device and host are one memory."""
    if options.read is None and options.to_device is None:
        raise RunError("--read or --to-device: give at least one, the way that the weights take")
    if options.write is not None and options.read is None:
        raise RunError("--write: needs --read")
    read = _rate("read", options.read) if options.read else 0.0
    link = _rate("to-device", options.to_device) if options.to_device else math.inf
    one = options.to_device is None
    if not options.bytes_per_parameter > 0:
        raise RunError(f"--bytes-per-parameter: expected a number above 0, got {options.bytes_per_parameter}")
    return Machine(
        flops=_flops(options.flops),
        read=read,
        write=_rate("write", options.write) if options.write else read,
        to_device=link,
        to_host=link,
        one_memory=one,
        cores=CORES,
        compute_cores=CORES if one else 0,
        read_seconds=IO_SECONDS,
        write_seconds=IO_SECONDS,
        update_seconds=UPDATE_SECONDS,
    )


def _flops(text: str) -> float:
    """Returns FLOP/s of a text such as ``165TFLOPS``."""
    try:
        return parse_size(re.sub(r"\s*FLOP(S|/s)$", "", text, flags=re.IGNORECASE))
    except ValueError:
        raise RunError(f"--flops: expected FLOP/s such as 165TFLOPS, got {text!r}") from None


def _rate(name: str, text: str) -> float:
    """Returns bytes per second of a text such as ``7GB/s``."""
    try:
        return parse_size(re.sub(r"\s*/s$", "", text, flags=re.IGNORECASE))
    except ValueError:
        raise RunError(f"--{name}: expected bytes per second such as 7GB/s, got {text!r}") from None


def _size(options: ForecastOptions, name: str) -> float:
    """Returns a budget in bytes, endless if it was not given."""
    text = getattr(options, name)
    try:
        return math.inf if text is None else parse_size(text)
    except ValueError as error:
        raise RunError(f"--{name.replace('_', '-')}: {error}") from None
