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
from collections.abc import Sequence
from typing import Any

import torch
from shared import harness, machine
from shared.results import write_json

from microbench import decoder, fused, layers, report, step
from microbench.entries import entries, small_checks
from microbench.options import complete, parser
from microbench.settings import Deadline, Findings, Section, Settings, failures, first_line

SECTIONS: dict[str, Section] = {
    "operators": layers.operators,
    "linears": layers.linears,
    "fused": fused.fused,
    "adapters": layers.adapters,
    "ablation": layers.ablation,
    "decoder": decoder.decoder,
    "step": step.step,
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
        print("\n".join(report.lines(row)), flush=True)
        save()


def closing_lines(findings: Findings) -> list[str]:
    """Sums over decoder layers, and what is missing or wrong, at the end of the text."""
    lines = report.layer_lines(report.whole_layers(findings.rows))
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
        data = report.result(settings, findings, options["machine"], deadline.elapsed)
        if options["out"]:
            write_json(options["out"] / "suite.json", data)
        return data

    small_checks(settings, findings, list(entries(settings).values()))
    print("\n".join(report.check_lines(findings.checks)))
    print(report.header(settings.device.type), flush=True)
    for index, name in enumerate(sections):
        part = SHARES.get(name, 1) / sum(SHARES.get(other, 1) for other in sections[index:])
        run_section(name, settings, findings, deadline, part, save)
    data = save()
    closing = closing_lines(findings)
    print("\n".join(closing))
    if options["out"]:
        text = [line for row in findings.rows for line in report.lines(row)]
        about = f"{data['machine']['command']}, commit {data['machine']['commit']}"
        path = options["out"] / "suite.txt"
        path.write_text("\n".join([about, report.header(settings.device.type), *text, *closing]) + "\n")
        if drawn := report.panels(data):
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
