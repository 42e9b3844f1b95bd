"""What all benchmarks have in common: options, a quiet machine, targets, and the files of a result."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.utils import logging as transformers_logging

from shared import machine
from shared.results import RESULTS, cell, width, write_json

QUIET = 0.05
"""A result is not to be trusted if other processes took more of the machine than this."""
Data = Mapping[str, Any]
Columns = Sequence[tuple[str, str, str, float]]
"""Of a table: title, key, format, and the factor that values are multiplied by."""
SECONDS: Columns = (
    ("ms", "seconds", "9.1f", 1e3),
    ("+-%", "spread", "6.1f", 100),
    ("cpus", "processors", "6.2f", 1),
)
"""Columns of what `timing.medians` returns."""


@dataclass(frozen=True)
class Target:
    """What a value must be: within bounds, or anything where there are none.

    Attributes:
        what: it is.
        value: None: it was not measured, which misses every bound.
        least, most: bounds.
    """

    what: str
    value: float | None
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        """Whether it is within its bounds."""
        if self.least is None and self.most is None:
            return True
        value = self.value
        return value is not None and not (
            (self.least is not None and not value >= self.least)
            or (self.most is not None and not value <= self.most)
        )

    @property
    def line(self) -> str:
        """Says so."""
        value = "nothing" if self.value is None else f"{self.value:.3g}"
        bounds = [("least", self.least), ("most", self.most)]
        must = " and ".join(f"at {word} {bound:g}" for word, bound in bounds if bound is not None)
        return f"{'met' if self.met else 'MISSED':6}  {self.what}: {value} (must be {must})"


class Panel(NamedTuple):
    """One part of a figure: numbers of several series, as bars or as lines.

    Attributes:
        ylabel: what the numbers are.
        series: numbers by place, by name.
        title, xlabel: more words.
        bars: else lines.
        log: whether the numbers' axis is logarithmic.
    """

    ylabel: str
    series: Mapping[str, Mapping[Any, float]]
    title: str = ""
    xlabel: str = ""
    bars: bool = True
    log: bool = False


@dataclass
class Found:
    """What a benchmark has found.

    Attributes:
        data: what the JSON file holds beside the machine.
        lines: the text.
        must: what is judged.
        panels: the figure; none = there is none.
    """

    data: dict[str, Any]
    lines: list[str]
    must: Sequence[Target] = ()
    panels: Sequence[Panel] = field(default_factory=list)


def documented_parser(about: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help shows a module's docstring as it stands."""
    lines = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=sys.argv[0], description=about, formatter_class=lines)


def start_quietly(threads: int) -> None:
    """Silences warnings and Transformers' advice, and sets PyTorch's threads."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)


def measured(
    about: str | None,
    measure: Callable[[argparse.Namespace], Found],
    *,
    out: str,
    turns: int = 5,
    threads: int = 2,
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> int:
    """Measures, prints, and writes `OUT.json`, `OUT.txt` and, where there are panels, `OUT.png`.

    Args:
        about: the help.
        measure: gets `quick`, `turns`, `threads` and its own options.
        out: name in results/.
        turns, threads: where none are given; with `--quick` there is one turn.
        add: adds its own options.

    Returns:
        The exit code: 1 where a target is missed. `--quick` judges nothing, and writes only to a given
        `--out`.
    """
    parser = documented_parser(about)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--turns", type=int, help=f"of each contender; default: {turns}, quick 1")
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--out", help=f"name in results/, or a path; default: {out}")
    add(parser)
    options = parser.parse_args()
    options.turns = options.turns or (1 if options.quick else turns)
    start_quietly(options.threads)
    try:
        with machine.OtherProcesses() as others:
            found = measure(options)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    name = options.out or (None if options.quick else out)
    path = None if name is None else Path(name) if "/" in name else RESULTS / name
    return report(found, path, quick=options.quick, others=others.share)


def report(found: Found, path: Path | None, *, quick: bool, others: float | None, command: str = "") -> int:
    """Prints and writes a result; returns the exit code.

    A result that was kept brings its machine, and whether it was `quick`, along in its data.
    """
    data: dict[str, Any] = {"quick": quick, "other_processes_share": others, **found.data}
    data["must"] = [asdict(target) | {"met": target.met} for target in found.must]
    info = data.get("machine") or machine.describe(command or None)
    quick, others = data["quick"], data["other_processes_share"]
    lines = [*heading(info, quick, others), "", *found.lines, *verdicts(found.must, quick)]
    print("\n".join(lines), flush=True)
    if path is not None:
        write_json(Path(f"{path}.json"), {"machine": info, **data})
        Path(f"{path}.txt").write_text("\n".join(lines) + "\n")
        if found.panels:
            draw(Path(f"{path}.png"), found.panels, title(info, quick=quick))
    missed = [] if quick else [target.what for target in found.must if not target.met]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def heading(info: Data, quick: bool, others: float | None) -> list[str]:
    """Returns lines about the machine, the command, and whether other processes disturbed it."""
    lines = [
        f"{info['processor']}, {info['logical_cores']} cores, {info['memory_gib']} GiB, {info['threads']} "
        f"threads, torch {info['torch']}, commit {info['commit']}, {info['date']}: {info['command']}"
    ]
    if others is not None:
        loud = "" if others <= QUIET else f": NOT QUIET, at most {QUIET} is allowed"
        lines.append(f"other processes took {others} of the machine{loud}")
    return [*lines, *["--quick: sizes that show nothing"] * quick]


def verdicts(must: Sequence[Target], quick: bool) -> list[str]:
    """Returns a line for each target with a bound; none of `--quick`."""
    judged = [one.line for one in must if one.least is not None or one.most is not None]
    return [] if quick or not judged else ["", *judged]


def table(rows: Mapping[str, Data], columns: Columns) -> list[str]:
    """Returns a table of values by column key, by the row's name."""
    name_width = max(map(len, rows), default=0)
    widths = [max(len(title), width(spec)) for title, _, spec, _ in columns]
    titles = "".join(f"  {title:>{wide}}" for (title, *_), wide in zip(columns, widths, strict=True))
    lines = [f"{'':{name_width}}{titles}"]
    for name, row in rows.items():
        cells = (cell(row.get(key), spec, factor) for _, key, spec, factor in columns)
        lines.append(
            f"{name:{name_width}}" + "".join(f"  {one:>{w}}" for one, w in zip(cells, widths, strict=True))
        )
    return lines


def title(info: Data, *, quick: bool, processor: str = "processor") -> str:
    """Returns a figure's title: where it was measured, with which torch, at which commit."""
    tiny = ", --quick: sizes that show nothing" if quick else ""
    return f"{info.get(processor)}, torch {info['torch']}, commit {info['commit']}{tiny}"


def draw(path: Path, panels: Sequence[Panel], title: str) -> None:
    """Draws panels below each other into a PNG, without a display."""
    if find_spec("matplotlib") is None:
        print("no figure: matplotlib is missing")
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (11, 3.8 * len(panels))
    made, axes = plt.subplots(len(panels), figsize=size, squeeze=False, layout="constrained")
    for place, panel in zip(axes[:, 0], panels, strict=True):
        if panel.bars:
            _bars(place, panel)
        else:
            for name, points in panel.series.items():
                place.plot(list(points), list(points.values()), "o-", markersize=4, label=name)
        if panel.log:
            place.set_yscale("log")
        else:
            place.set_ylim(bottom=0)
        place.set(ylabel=panel.ylabel, xlabel=panel.xlabel)
        place.set_title(panel.title, fontsize=9)
        place.grid(axis="y", alpha=0.3)
        place.legend(fontsize=6)
    made.suptitle(title, fontsize=9)
    made.savefig(path, dpi=110)
    plt.close(made)


def _bars(axes: Any, panel: Panel) -> None:
    """Draws groups of bars, a group for each place; a series that lacks one leaves a gap."""
    places = list(dict.fromkeys(place for points in panel.series.values() for place in points))
    wide = 0.8 / max(1, len(panel.series))
    for number, (name, points) in enumerate(panel.series.items()):
        shift = wide * (number - (len(panel.series) - 1) / 2)
        bars = axes.bar(
            [places.index(each) + shift for each in points], list(points.values()), wide, label=name
        )
        if len(places) * len(panel.series) <= 48:
            axes.bar_label(bars, fmt="%.3g", fontsize=5)
    axes.set_xticks(range(len(places)), [str(each) for each in places], fontsize=6)
    if max(map(len, map(str, places)), default=0) > 90 // max(1, len(places)):
        axes.tick_params(axis="x", labelrotation=20)
