"""What follows from the contenders' rows, each beside its target, and the text and the figure of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, stdev
from typing import Any

from shared.harness import Data, Panel, Target, table

from pipeline.measures import GIGABIT
from pipeline.model import Shape
from pipeline.places import DELAYS, Place

Rows = Mapping[str, Mapping[str, Any]]
Lines = list[dict[str, Any]]
OVERLAP: dict[str, Any] = {"must": 0.97, "at_least": True}
"""Throughput with delays on the links, over that without."""
BUBBLE = 0.03
"""How far a measured bubble may be from the simulated one, where nothing limits the links."""


def ratio(rows: Rows, ours: str, peer: str, must: float | None) -> Lines:
    """Throughput of one contender over that of another one; what must be and did not run has no value."""
    line = {"what": f"{ours} / {peer}", "value": None, "must": must, "at_least": True}
    if ours not in rows or peer not in rows:
        return [line] if must else []
    values = (rows[ours], rows[peer], "tokens_per_second")
    return [line | {"value": _within_turns(*values), "error": _standard_error(*values)}]


def _within_turns(row: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float:
    """The median over turns of a ratio: what runs in one turn has met the same machine."""
    return median(a / b for a, b in zip(row["each"][key], other["each"][key], strict=True))


def _standard_error(row: Mapping[str, Any], other: Mapping[str, Any], key: str) -> float | None:
    """Of the mean over turns of a ratio; one turn has none."""
    found = [a / b for a, b in zip(row["each"][key], other["each"][key], strict=True)]
    return stdev(found) / len(found) ** 0.5 if len(found) > 1 else None


def throughput(rows: Rows) -> Lines:
    """Ours against ours and torch's, FSDP2 and tensor parallelism on one machine."""
    found = ratio(rows, "lorapp", "gpipe", 1.7) + ratio(rows, "lorapp N=4", "1f1b N=4", 1.15)
    for suffix in ("", " N=4"):
        for peer in ("torch GPipe", "torch 1F1B", "FSDP2", "FSDP2 keep", "TP", "TP by hand"):
            found += ratio(rows, f"lorapp{suffix}", f"{peer}{suffix}", None)
    found += ratio(rows, "lorapp N=4", "torch 1F1B N=4, joint", None)
    found += ratio(rows, "torch 1F1B N=4, joint", "torch 1F1B N=4", None)
    found += ratio(rows, "1f1b N=4", "torch 1F1B N=4", None)
    return [line | {"section": "throughput"} for line in found]


def network(rows: Rows, shape: Shape) -> Lines:
    """The same between two network namespaces."""
    found = ratio(rows, "lorapp N=4", "torch 1F1B N=4", 1.3)
    found += ratio(rows, "lorapp N=4", "torch 1F1B N=4, joint", None)
    found += ratio(rows, "torch 1F1B N=4, joint", "torch 1F1B N=4", None)
    for suffix in ("", " N=4"):
        # `keep` holds all weights between forward and backward, which is not for models that need D devices
        for peer, must in (("FSDP2", 2.0), ("FSDP2 keep", None), ("TP", 2.0), ("TP by hand", 2.0)):
            found += ratio(rows, f"lorapp{suffix}", f"{peer}{suffix}", must)
    found += ratio(rows, "lorapp", "gpipe", None) + ratio(rows, "lorapp N=4", "1f1b N=4", None)
    found += ratio(rows, "1f1b N=4", "torch 1F1B N=4", None)  # what is not LoRAPP's: connections and runtime
    seconds = shape.message_bytes / GIGABIT
    stage = max(sum(times.values()) for times in rows["lorapp"]["times"]["stages"])
    share = {"what": "a transfer at 1 Gbit/s / a micro-batch's time on a stage", "value": seconds / stage}
    return [line | {"section": "network"} for line in [share | {"between": [0.2, 0.5]}, *found]]


def volume(rows: Rows, place: Place) -> Lines:
    """Bytes sent per micro-batch against `2 (D - 1) T h itemsize`."""
    assert place.shape is not None
    least = 2 * (place.stages - 1) * place.shape.message_bytes
    found = []
    for name in ("lorapp", "gpipe", "lorapp N=4", "1f1b N=4"):
        about = {"section": "volume", "bytes": least, "must": None}
        of = "/ 2 (D - 1) T h itemsize"
        sent = rows[name]["bytes_per_micro_batch"] / least
        what = f"{name}, {place.name}, bytes sent by the stages {of}"
        found.append(about | {"what": what, "value": sent, "between": [0.98, 1.02]})
        if place.network:
            what = f"{name}, {place.name}, bytes on the wire, headers of its packets included {of}"
            found.append(about | {"what": what, "value": rows[name]["wire_bytes_per_micro_batch"] / least})
    return found


def bubbles(rows: Rows, place: Place) -> Lines:
    """Measured against simulated bubbles, and throughput against the slowest stage's where L is at least 2D.

    Of tasks one after the other, the measured window is one task's, the simulated one holds several: these
    are printed, as are those between network namespaces, and nothing must be.
    """
    found: Lines = []
    must = not place.network and place.name != "tasks"
    cases = {case.name: case for case in place.cases}
    for name, row in rows.items():
        both = zip(row["each"]["bubble"], row["each"]["simulated_bubble"], strict=True)
        differences = [m - s for m, s in both if m is not None and s is not None]
        if not differences:
            continue
        about = {"section": "bubbles", "place": place.name}
        what = f"{place.name}, {name}: bubble measured - simulated"
        line = {"what": what, "value": median(differences), "must": None}
        line["worst"] = max(differences, key=abs)
        if must:
            line["between"] = [-BUBBLE, BUBBLE]
        found.append(about | line)
        case = cases[name]
        full = (case.at_once or case.adapters) >= 2 * place.stages
        if case.schedule == "lorapp" and full and not case.delay:
            what = f"{place.name}, {name}: slowest stage's throughput / measured"
            line = {"what": what, "value": 1.0 / row["of_slowest_stage"], "at_least": False}
            found.append(about | line | {"must": 1.03 if must else None})
    return found


def overlap(rows: Rows, place: Place) -> Lines:
    """LoRAPP with delays on the links against LoRAPP without, L = 2D.

    Where stages compute, turns differ by a tenth, by the machine's speed; there the must is for throughput
    over that of the turn's own slowest stage, were it never to wait. The plain ratio stands beside it, with
    its standard error.
    """
    base = "lorapp" if place.shape else f"lorapp L={2 * place.stages}"
    found = []
    for share in DELAYS:
        slow, fast = rows[f"{base}, delay {share} T_f"], rows[base]
        steady = (
            None not in slow["each"]["steady_tokens_per_second"] + fast["each"]["steady_tokens_per_second"]
        )
        key = "steady_tokens_per_second" if steady else "tokens_per_second"
        word = "steady throughput" if steady else "throughput"
        what = f"{place.name}, delay {share} T_f injected: {word} / without"
        about = {"section": "overlap", "delay_seconds": slow["delay"]}
        line = {"what": what, "value": _within_turns(slow, fast, key)} | OVERLAP
        if place.shape:
            line |= {"must": None, "error": _standard_error(slow, fast, key)}
        found.append(about | line)
        if place.shape and steady:
            value = _within_turns(slow, fast, "of_slowest_stage")
            found.append(about | {"what": f"{what}, over the slowest stage's", "value": value} | OVERLAP)
    return found


def tasks(rows: Rows) -> Lines:
    """Mean completion time and the time until all tasks have ended, lorapp's over the flushed schedules'."""
    found = []
    counts = sorted({int(name.split()[0].partition("=")[2]) for name in rows if name.startswith("tasks=")})
    for count in counts:
        for ours in (f"tasks={count} lorapp", f"tasks={count} lorapp, 2 at once"):
            for peer in ("gpipe", "1f1b"):
                if ours not in rows:
                    continue
                other = rows[f"tasks={count} {peer}"]
                for key in ("mean_completion_seconds", "seconds"):
                    value = rows[ours][key] / other[key]
                    what = f"{ours} / {peer} one after the other: {key}"
                    found.append({"section": "tasks", "what": what, "value": value, "must": None})
    return found


def lines_of(sections: Sequence[str], found: Sequence[tuple[Place, Rows]]) -> Lines:
    """Everything that follows."""
    lines: Lines = []
    for place, rows in found:
        real = place.name == "real"
        if place.network:
            assert place.shape is not None
            lines += network(rows, place.shape) + volume(rows, place) + bubbles(rows, place)
            continue
        if real and "throughput" in sections:
            lines += throughput(rows)
        if real and "volume" in sections:
            lines += volume(rows, place)
        if "bubbles" in sections:
            lines += bubbles(rows, place)
        if "overlap" in sections and (place.name == "overlap" or place.sleep):
            lines += overlap(rows, place)
        if place.name == "tasks":
            lines += tasks(rows)
    return lines


_COLUMNS = (
    ("tokens/s", "tokens_per_second", "10.1f", 1),
    ("steady", "steady_tokens_per_second", "10.1f", 1),
    ("bubble %", "bubble", "9.1f", 100),
    ("simulated", "simulated_bubble", "9.1f", 100),
    ("+-%", "spread", "6.1f", 100),
    ("processors", "processors", "10.2f", 1),
    ("others %", "other_processes_share", "8.1f", 100),
    ("mean end s", "mean_completion_seconds", "10.2f", 1),
)


def text(data: Data) -> list[str]:
    """Returns a table of each place, and the lines that follow from them; those without a bound, too."""
    lines: list[str] = []
    for place in data["places"]:
        columns = tuple((title, key, spec, float(factor)) for title, key, spec, factor in _COLUMNS)
        lines += ["", _title(place), *table(place["rows"], columns)]
    lines += ["", *map(_line, data["lines"])]
    return lines + [f"not run: {name}: {reason}" for name, reason in data["not_run"].items()]


def targets(lines: Sequence[Data]) -> list[Target]:
    """Returns what lines must be."""
    found = []
    for line in lines:
        least, most = line.get("between", (None, None))
        if line.get("must") is not None:
            least, most = (line["must"], None) if line["at_least"] else (None, line["must"])
        found.append(Target(line["what"], line["value"], least, most))
    return found


def _title(place: Data) -> str:
    if place["sleep"]:
        ms = [1e3 * place["sleep"][way] for way in ("forward", "backward")]
        return (
            f"{place['name']}: {place['stages']} processes of SLEEP KERNELS ({ms[0]:g} ms forward, "
            f"{ms[1]:g} ms backward); micro-batches/s instead of tokens/s"
        )
    sizes = {name: value for name, value in place["shape"].items() if name != "targets"}
    shape = ", ".join(f"{name} {value}" for name, value in sizes.items())
    shape += f"; LoRA on {', '.join(place['shape']['targets'])}"
    wire = f", between two network namespaces at {place['rate']}" if place["network"] else ""
    return f"{place['name']}: {place['stages']} processes of one thread{wire}; {shape}"


def _line(line: Data) -> str:
    value = "not run" if line["value"] is None else f"{line['value']:.3f}"
    error = f" +- {line['error']:.3f}" if line.get("error") is not None else ""
    worst = f", in the worst turn {line['worst']:.3f}" if "worst" in line else ""
    return f"{line['section']}: {line['what']}: {value}{error}{worst}"


def panels(data: Data) -> list[Panel]:
    """Returns the figure: throughput, bubbles of stages that sleep, and completion times of tasks."""
    found = []
    for place in data["places"]:
        rows, title = place["rows"], _title(place).partition(";")[0]
        if place["name"] == "tasks":
            points: dict[str, dict[Any, float]] = {}
            for name, row in rows.items():
                count, _, way = name.removeprefix("tasks=").partition(" ")
                points.setdefault(way, {})[int(count)] = row["mean_completion_seconds"]
            found.append(Panel("mean completion time, s", points, title, "tasks", bars=False))
            continue
        keys = ("bubble", "simulated_bubble") if place["sleep"] else ("tokens_per_second",)
        series = {key: {n: row[key] for n, row in rows.items() if row[key] is not None} for key in keys}
        found.append(Panel(", ".join(keys), series, title))
    return found
