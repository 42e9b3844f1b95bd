"""The sections: what follows from the contenders' rows, each beside its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, stdev
from typing import Any

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
    """Everything that follows.

    Args:
        sections: that were asked for.
        found: the rows of each place.
    """
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
