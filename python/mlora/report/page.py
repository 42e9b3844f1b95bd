"""Renders the report of a run: one HTML page that needs no network and holds no script of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mlora.report.charts import Chart, Form, Series, chart, spreads
from mlora.report.history import MOST, Curve, Point
from mlora.report.numbers import count, duration, number, percent, size
from mlora.report.read import Adapter, Run
from mlora.report.results import result_columns, settings_of, versions_of
from mlora.store.requests import ENDED

OPEN = 6  # adapters whose parts are open when the page is; of more, only a small chart of each is seen
FINDABLE = 12  # adapters from which on the page has a field to find one
POINTS = 6000  # of one curve in all adapters together: bounds the page's size
STATES = {
    "finished": "✓",
    "running": "●",
    "waiting": "◌",
    "queued": "◌",
    "paused": "\u2161",
    "unfinished": "◐",
    "interrupted": "◐",
    "stopped": "✕",
    "failed": "✕",
    "refused": "✕",
    "cancelled": "\N{EN DASH}",
    "pruned": "\N{EN DASH}",
}
"""The sign of each state of a run or an adapter: a state is never told by colour alone."""
_METRIC_FORMS = {"accuracy": percent, "rewards/accuracies": percent}


@dataclass(frozen=True)
class Part:
    """What the page shows of one adapter."""

    id: str
    name: str
    state: str
    message: str
    steps: str
    settings: Sequence[tuple[str, str]]
    loss: Chart | None
    others: Sequence[Chart]
    small: Chart | None
    samples: Mapping[str, Any] | None


def render(run: Run) -> str:
    """Returns the page. Everything that comes from the run's files is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "duration": duration, "size": size}
    environment.globals["signs"] = STATES
    spread = any(_spread(each, "loss", "eval_loss") for each in run.adapters)
    parts = [_part(run, index, each, logarithmic=spread) for index, each in enumerate(run.adapters)]
    return environment.get_template("page.html").render(
        run=run,
        name=Path(run.path).name,
        base=run.base,
        figures=_figures(run),
        sentence=_sentence(run),
        faults=[part for part in parts if part.state in ("refused", "stopped")],
        parts=parts,
        columns=result_columns(run.adapters, run.shown),
        open=len(parts) <= OPEN,
        findable=len(parts) >= FINDABLE,
        memory=_memory(run),
        timeline=run.timeline,
        streams=_streams(run),
        no_samples=_no_samples(run),
        versions=versions_of(run.starts),
        warnings=list(dict.fromkeys(line for start in run.starts for line in start.get("warnings", ()))),
        times=_times(run),
        moment=_moment,
    )


def _moment(when: datetime) -> str:
    return f"{when.day} {when:%B %Y, %H:%M} {when.tzname()}"


def _times(run: Run) -> str:
    """Returns when the run was at work."""
    ended = f"ended {_moment(run.ended)}" if run.ended else f"read {_moment(run.read)}"
    if not run.starts:
        return ended.capitalize()
    resumed = len(run.starts) - 1
    often = {0: "", 1: ", resumed once"}
    times = often.get(resumed, f", resumed {resumed} times")
    return f"Started {_moment(run.starts[0]['began'])}{times}, {ended}"


def _sentence(run: Run) -> str:
    """Returns what the run is, in one sentence."""
    pipeline = run.config.get("pipeline") or {}
    processes = pipeline.get("stages", 1) * pipeline.get("replicas", 1)
    full = run.config.get("method") == "full"
    adapters = f"{len(run.adapters)} adapter{'s' * (len(run.adapters) != 1)}"
    what = "All weights of" if full else f"{adapters} over"
    how = f", in {processes} processes" if processes > 1 else ""
    trials = ", trials of a sweep" if run.config.get("sweep") else ""
    return f"{what} {run.base}{trials}{how}"


def _figures(run: Run) -> list[tuple[str, str]]:
    """Returns the figures at the head: label and value."""
    history = run.history
    tokens = sum(each.tokens for each in history.adapters.values())
    seconds = max(run.seconds, history.seconds)
    speed = tokens / seconds if seconds else 0.0
    peak = max((point.high for point in history.memory.points()), default=None)
    return [
        ("adapter" if len(run.adapters) == 1 else "adapters", f"{len(run.adapters):,}"),
        ("optimizer steps", f"{history.steps:,}"),
        ("trained tokens", count(tokens)),
        ("tokens/s", count(speed) if speed >= 1e6 else number(speed or None)),
        ("time", duration(seconds)),
        ("peak memory", size(peak)),
    ]


def _part(run: Run, index: int, adapter: Adapter, *, logarithmic: bool) -> Part:
    """Returns an adapter's part; `logarithmic` are the axes of losses."""
    entry, curves = adapter.entry, adapter.history.curves
    most = max(32, min(2 * MOST, POINTS // max(1, len(run.adapters))))
    total = entry["max_steps"] or entry["step"]
    span = (0.0, float(max(entry["step"] if entry["state"] in ENDED else total, 1)))

    def draw(title: str, keys: Mapping[str, str], form: Form, **options: Any) -> Chart | None:
        series = [
            Series(label, style, _points(curves, key, most), dots=style == "held")
            for (key, label), style in zip(keys.items(), ("train", "held"), strict=False)
            if key in curves
        ]
        return chart(title, series, form, span=span, **options)

    losses = {"loss": "training", "eval_loss": "held out"}
    norms = _spread(adapter, "grad_norm")
    charts = [
        draw("Learning rate", {"learning_rate": "learning rate"}, number, zero=True),
        draw("Gradient norm", {"grad_norm": "gradient norm"}, number, logarithmic=norms),
    ]
    charts += [
        draw(name, {key: "training", f"eval_{key}": "held out"}, form) for key, name, form in _metrics(curves)
    ]
    if "eval_exact_match" in curves and len(curves["eval_exact_match"].points()) > 2:
        held = Series("held out", "held", _points(curves, "eval_exact_match", most), dots=True)
        charts.append(chart("Exact match", [held], percent, span=span))
    return Part(
        id=f"adapter-{index + 1}",
        name=adapter.name,
        state=entry["state"],
        message=entry.get("message", ""),
        steps=f"{entry['step']:,}" + (f" of {total:,}" if total != entry["step"] else ""),
        settings=settings_of(adapter),
        loss=draw("Loss", losses, number, logarithmic=logarithmic, height=220),
        others=[each for each in charts if each],
        small=draw(adapter.name, losses, number, logarithmic=logarithmic, height=90)
        if len(run.adapters) > OPEN
        else None,
        samples=_samples(adapter),
    )


def _spread(adapter: Adapter, *keys: str) -> bool:
    own = adapter.history.curves
    curves = [own[key] for key in keys if key in own]
    return spreads([point.y for curve in curves for point in curve.points()])


def _points(curves: Mapping[str, Curve], key: str, most: int) -> Sequence[Point]:
    return curves[key].points(most) if key in curves else []


def _metrics(curves: Mapping[str, Curve]) -> list[tuple[str, str, Form]]:
    """Returns key, title and form of the objective's metrics."""
    plain = ("loss", "learning_rate", "grad_norm", "exact_match")
    keys = dict.fromkeys(key.removeprefix("eval_") for key in curves)
    return [(key, key, _METRIC_FORMS.get(key, number)) for key in keys if key not in plain]


def _samples(adapter: Adapter) -> dict[str, Any] | None:
    """Returns answers before training and after it: of the step whose weights were saved, or the last one."""
    if not adapter.samples:
        return None
    saved = adapter.entry.get("saved_step")
    last = saved if saved in adapter.samples else max(adapter.samples)
    before, after = adapter.samples.get(0, []), adapter.samples[last] if last else []
    rows = []
    for place in range(max(len(before), len(after))):
        old = before[place] if place < len(before) else None
        new = after[place] if place < len(after) else None
        rows.append({"asked": new or old, "before": old, "after": new})
    return {"rows": rows, "last": last}


def _no_samples(run: Run) -> str:
    """Returns why no adapter has samples; empty if one has."""
    if any(adapter.samples for adapter in run.adapters):
        return ""
    if not any(adapter.config.get("eval_exact_match") for adapter in run.adapters):
        return (
            "No answers to held-out prompts: no adapter has eval_exact_match: true, which makes a run answer "
            "the prompts of eval_dataset."
        )
    return "No answers to held-out prompts: the run has no samples.jsonl, or no adapter was evaluated."


def _memory(run: Run) -> Chart | None:
    points = [Point(1, p.x, p.high, p.high, p.high) for p in run.history.memory.points()]
    rules = {} if run.limit is None else {f"limit {size(run.limit)}": run.limit}
    if run.memory and (base := run.memory.get("base_bytes")):
        rules[f"base model {size(base)}"] = base
    return chart(
        "Peak memory",
        [Series("peak so far", "held", points)],
        size,
        across="training time",
        across_form=duration,
        rules=rules,
        zero=True,
        unit=_unit_of([*rules.values()] + [point.high for point in points]),
        height=180,
    )


def _unit_of(sizes: Sequence[float]) -> int:
    """Returns GiB or MiB in bytes, whichever suits the largest of these sizes."""
    return 2**30 if max(sizes, default=0) > 2**30 else 2**20


def _streams(run: Run) -> list[str]:
    """Returns what the micro-batches in the timeline were for, in the order of their first work."""
    if run.timeline is None:
        return []
    return list(dict.fromkeys(work.stream for stage in run.timeline.stages for work in stage if work.stream))
