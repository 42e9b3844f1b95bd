"""Microbenchmarks of mlora_ext beside its peers, on a CPU or a CUDA GPU.

    python -m bench suite                              # every section, on the GPU if there is one
    python -m bench suite linears --models llama-2-7b --check --out results
    python -m bench suite --quick                      # tiny sizes: tries the suite, shows nothing

Sections: `operators` forward and backward apart; `linears` every linear layer of the models; `fused` the
seven of a decoder layer, q, k, v and gate, up in one call each; `decoder` one Llama decoder layer; `step` a
training step of a small Llama; `adapters` 1 to 64 of them on the same rows; `ablation` with and without
in-place scatter.

All contenders of a row take turns in one process. Before anything is timed, each is compared with the
operator in fp64 on a small layer; with `--check` at every shape that is timed too. What was wrong is not
timed. Exits with 1, after results are written, where something of ours failed or anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from shared import harness, machine
from shared.harness import Panel
from shared.results import cell, dtype_name, write_json
from shared.shapes import MODELS

from microbench import layers, models
from microbench.entries import FROZEN, entries, small_checks
from microbench.settings import Deadline, Findings, Section, Settings, complete, failures, first_line, parser
from mlora_ext.backends import gpu_base_gemm
from mlora_ext.backends.selection import gpu_operator


def header(device: str) -> str:
    """Titles of the columns; a CPU launches nothing, its operator calls are counted."""
    calls = "op calls" if device == "cpu" else "launches"
    titles = f"{'median ms':>10} {'TFLOP/s':>8} {'GB/s':>8} {'+-%':>5} {'/ frozen':>9} {calls:>9}"
    return f"  {'':32} {titles} {'peak MiB':>9}"


def check_lines(checks: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The largest relative error of each contender on the small layer, before anything was timed."""
    found = []
    for dtype, each in checks.items():
        found.append(f"checked on a small layer against fp64, {dtype}: relative errors")
        found += [f"  {name:40} {error:.1e}" for name, error in each.items()]
    return found


def row_title(row: Mapping[str, Any]) -> str:
    """What a row is about, and its computed limit."""
    size = f" {row['d_in']} -> {row['d_out']}," if "d_in" in row else ","
    ranks = "/".join(map(str, sorted(set(row["ranks"]))))
    words = [
        f"{row['section']}: {row['name']}{size} {row['rows']} rows, {row['adapters']} adapters, r {ranks}, "
        f"{row['layout']}, {row['dtype']}, dropout {row['dropout']}"
    ]
    if row.get("part", "both") != "both":
        words.append(row["part"])
    least = row.get("limit", {})
    if "ratio_to_frozen" in least:
        words.append(
            f"limit {least['ratio_to_frozen']:.3f} of frozen (+{1e3 * least['low_rank_seconds']:.3f} ms)"
        )
    return "; ".join(words)


def row_lines(row: Mapping[str, Any]) -> list[str]:
    """A row as text: what it is about, then a line for each contender."""
    found = [row_title(row)]
    for name, each in row["contenders"].items():
        calls = each.get("launches", each.get("operator_calls"))
        cells = [
            cell(each["seconds"], "10.3f", 1e3),
            cell(each.get("flops_per_second"), "8.3f", 1e-12),
            cell(each.get("bytes_per_second"), "8.1f", 1e-9),
            cell(each.get("spread"), "5.1f", 100),
            cell(each.get("ratio_to_frozen"), "9.3f"),
            cell(calls, "9d"),
            cell(each["peak_bytes"], "9.1f", 2**-20),
        ]
        share = f"  launch share {each['launch_share']:.2f}" if "launch_share" in each else ""
        found.append(f"  {name:32} {' '.join(cells)}{share}")
    return found


def whole_layers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The seven linears of a decoder layer together: of `linears` where every shape was measured, of `fused`.

    Returns:
        For each model, batch, layout and dtype: seconds and the ratio to the frozen layers of every contender
        that took part in all of them, and the ratio of the computed limit.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["section"] in ("linears", "fused"):
            key = tuple(row[name] for name in ("section", "model", "rows", "adapters", "layout", "dtype"))
            groups.setdefault(key, []).append(row)
    found = []
    for (section, model, total, adapters, layout, dtype), parts in groups.items():
        by_part = [part["contenders"] for part in parts]
        common = [name for name in by_part[0] if all(name in each for each in by_part)]
        shapes = 1 if section == "fused" else len(MODELS[model].linears)
        if len(parts) < shapes or FROZEN not in common:
            continue
        seconds = {
            name: sum(part["count"] * part["contenders"][name]["seconds"] for part in parts)
            for name in common
        }
        least = sum(part["count"] * part["limit"]["low_rank_seconds"] for part in parts)
        found.append(
            {
                "model": model + (", fused" if section == "fused" else ""),
                "rows": total,
                "adapters": adapters,
                "layout": layout,
                "dtype": dtype,
                "seconds": seconds,
                "ratio_to_frozen": {name: value / seconds[FROZEN] for name, value in seconds.items()},
                "limit_ratio_to_frozen": 1 + least / seconds[FROZEN],
            }
        )
    return found


def layer_lines(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """`whole_layers` as text."""
    found = []
    for layer in layers:
        ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in layer["ratio_to_frozen"].items())
        found.append(
            f"seven linears of {layer['model']}, {layer['rows']} rows, {layer['adapters']} adapters, "
            f"{layer['layout']}, {layer['dtype']}: {ratios}; limit {layer['limit_ratio_to_frozen']:.3f}"
        )
    return found


def result(
    settings: Settings, findings: Findings, machine: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """What `suite.json` holds."""
    options = asdict(settings) | {
        "device": str(settings.device),
        "dtypes": [dtype_name(dtype) for dtype in settings.dtypes],
    }
    place: dict[str, Any] = {}
    if settings.device.type == "cuda":
        place["architecture"] = _architecture(settings.device)
        if "cuda" in settings.backends:
            choice = gpu_operator("cuda").base_gemm  # type: ignore[attr-defined]
            place["base_gemm"] = [*gpu_base_gemm.lines(choice.known(choice.times))]
    return {
        "machine": {**machine, **place},
        "settings": options,
        "seconds": round(seconds, 1),
        "ceilings": {name: ceiling.as_dict() for name, ceiling in findings.ceilings.items()},
        "checks": findings.checks,
        "failed": findings.failed,
        "skipped": findings.skipped,
        "not_run": findings.not_run,
        "layers": whole_layers(findings.rows),
        "rows": findings.rows,
    }


def _architecture(device: torch.device) -> str:
    """`sm_90` and the like."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """Returns the figure: ratios of the linears, adapters, ablation; of what was measured."""
    rows = {
        name: [r for r in data["rows"] if r["section"] == name]
        for name in ("linears", "adapters", "ablation")
    }
    calls = "operator_calls" if data["settings"]["device"] == "cpu" else "launches"
    found = [
        ("linears", "forward + backward / frozen", "ratio_to_frozen", 1.0, True),
        ("adapters", "ms", "seconds", 1e3, False),
        ("adapters", calls.replace("_", " "), calls, 1.0, False),
        ("adapters", "1 - kernel time / wall time", "launch_share", 1.0, False),
        ("ablation", "ms", "seconds", 1e3, True),
        ("ablation", "peak MiB", "peak_bytes", 2.0**-20, True),
    ]
    made = [_panel(rows[name], name, *how) for name, *how in found]
    return [panel for panel in made if panel.series]


def _panel(
    rows: Sequence[Mapping[str, Any]], title: str, ylabel: str, key: str, factor: float, bars: bool
) -> Panel:
    """Returns a key of all contenders; curves are against the number of adapters."""
    series: dict[str, dict[Any, float]] = {}
    for row in rows:
        place = (
            f"{row['name']}, {row['layout']}\nN={row['adapters']}, {row['dtype']}"
            if bars
            else row["adapters"]
        )
        for name, one in row["contenders"].items():
            if key in one:
                label = name if bars else f"{name}, {row['dtype']}"
                series.setdefault(label, {})[place] = factor * one[key]
        if key == "ratio_to_frozen" and key in row["limit"]:
            series.setdefault("computed limit", {})[place] = row["limit"][key]
    return Panel(ylabel, series, title, "" if bars else "adapters", bars)


SECTIONS: dict[str, Section] = {
    "operators": layers.operators,
    "linears": layers.linears,
    "fused": layers.fused,
    "adapters": layers.adapters,
    "ablation": layers.ablation,
    "decoder": models.decoder,
    "step": models.step,
}
SHARES = {"linears": 4}
"""Of the time that is left, against 1 for every other section that has not begun."""


def run_section(
    name: str, settings: Settings, findings: Findings, deadline: Deadline, part: float, save: Any
) -> None:
    """Measure a section's rows while there is time; print each, and save all that there is after each."""
    until = deadline.share(part)
    for case in SECTIONS[name](settings, findings):
        label = f"{name}: {case.label}"
        if until is not None and deadline.elapsed >= until:
            findings.not_run.append(label)
            continue
        try:
            row = {"section": name, **case.run()}
        except failures() as error:
            findings.failed[label] = first_line(error)
            print(f"FAILED {label}: {first_line(error)}", flush=True)
            continue
        findings.rows.append(row)
        print("\n".join(row_lines(row)), flush=True)
        save()


def closing_lines(findings: Findings) -> list[str]:
    """Sums over decoder layers, and what is missing or wrong, at the end of the text."""
    lines = layer_lines(whole_layers(findings.rows))
    lines += [f"skipped {name}: {reason}" for name, reason in findings.skipped.items()]
    if findings.not_run:
        lines.append(f"out of time, not run: {len(findings.not_run)} rows, first {findings.not_run[0]}")
    lines += [f"FAILED {name}: {reason}" for name, reason in findings.failed.items()]
    if not findings.rows:
        lines.append("FAILED: nothing was measured")
    return lines


def run(
    sections: Sequence[str], settings: Settings, skipped: dict[str, str], **options: Any
) -> dict[str, Any]:
    """Run sections and return what `suite.json` holds.

    Args:
        sections: names in `SECTIONS`.
        settings: complete ones.
        skipped: what is known to be missing.
        options: `machine`, what is known about it; `limit`, seconds; `out`, a folder or None.
    """
    findings, deadline = Findings(skipped=dict(skipped)), Deadline(options["limit"])

    def save() -> dict[str, Any]:
        data = result(settings, findings, options["machine"], deadline.elapsed)
        if options["out"]:
            write_json(options["out"] / "suite.json", data)
        return data

    small_checks(settings, findings, list(entries(settings).values()))
    print("\n".join(check_lines(findings.checks)))
    print(header(settings.device.type), flush=True)
    for index, name in enumerate(sections):
        part = SHARES.get(name, 1) / sum(SHARES.get(other, 1) for other in sections[index:])
        run_section(name, settings, findings, deadline, part, save)
    data = save()
    closing = closing_lines(findings)
    print("\n".join(closing))
    if options["out"]:
        text = [line for row in findings.rows for line in row_lines(row)]
        about = f"{data['machine']['command']}, commit {data['machine']['commit']}"
        path = options["out"] / "suite.txt"
        path.write_text("\n".join([about, header(settings.device.type), *text, *closing]) + "\n")
        if drawn := panels(data):
            processor = "processor" if settings.device.type == "cpu" else "gpu"
            name = harness.title(data["machine"], quick=settings.quick, processor=processor)
            harness.draw(options["out"] / "suite.png", drawn, name)
    return data


def main(arguments: Sequence[str] | None = None, program: str = "python -m bench suite") -> int:
    """Run the command line.

    Args:
        arguments: those after the program's name; default: of this process.
        program: its name, in help and results.

    Returns:
        The exit code: 0, or 1 where something failed or was wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    found = parser(program, __doc__.replace("python -m bench suite", program), SECTIONS)
    options = found.parse_args(given)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        found.error(f"SECTION: expected of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    try:
        return dispatch(options, " ".join([program, *given]))
    except (ValueError, OSError) as error:
        found.error(str(error))


def dispatch(options: argparse.Namespace, command: str) -> int:
    """Measures; returns the exit code."""
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    settings, skipped = complete(options)
    sections = options.sections or list(SECTIONS)
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out: expected a folder, {options.out}: {error.strerror}") from error
        for name in ("suite.json", "suite.txt", "suite.png"):
            (options.out / name).unlink(missing_ok=True)
    about = machine.describe(command, options.commit)
    print(json.dumps(about, indent=1))
    data = run(sections, settings, skipped, machine=about, limit=options.time_limit, out=options.out)
    return 1 if data["failed"] or not data["rows"] else 0
