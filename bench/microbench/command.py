"""Microbenchmarks of mlora_ext beside its peers, on a CPU or a CUDA GPU.

    python bench/suite.py                              # every section, on the GPU if there is one
    python bench/suite.py linears --models llama-2-7b --check --out results
    python bench/suite.py --quick                      # tiny sizes: tries the suite, shows nothing
    python bench/suite.py choose --show                # the table of backends, as it is

Sections: `operators` forward and backward apart; `linears` every linear layer of the models; `decoder` one
Llama decoder layer; `step` a training step of a small Llama; `adapters` 1 to 64 of them on the same rows;
`ablation` with and without in-place scatter; `choose` triton against cuda, shape by shape.

All contenders of a row take turns in one process. Before anything is timed, each is compared with the
operator in fp64 on a small layer; with `--check` at every shape that is timed too. What was wrong is not
timed. Exits with 1, after results are written, where something of ours failed or anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from linear.layouts import LAYOUTS
from shared import machine
from shared.shapes import MODELS

from microbench import choose, decoder, layers, plots, report, step
from microbench.entries import entries, small_checks
from microbench.settings import (
    BACKENDS,
    Deadline,
    Findings,
    Section,
    Settings,
    available,
    failures,
    first_line,
)

SECTIONS: dict[str, Section] = {
    "operators": layers.operators,
    "linears": layers.linears,
    "adapters": layers.adapters,
    "ablation": layers.ablation,
    "decoder": decoder.decoder,
    "step": step.step,
    "choose": choose.choose,
}
SHARES = {"linears": 4}
"""Of the time that is left, against 1 for every other section that has not begun."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def number(text: str) -> float:
    """A number, or NaN, which no range holds."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    """A time of the command line."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text}")
    return value


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage has thirty options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the options\n")


def parser(program: str) -> argparse.ArgumentParser:
    """The command line."""
    lines = argparse.RawDescriptionHelpFormatter
    about = __doc__.replace("python bench/suite.py", program)
    found = Parser(prog=program, description=about, formatter_class=lines)
    add = found.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    add("--device", help="cpu, cuda or cuda:<index>; default: cuda if there is one")
    add("--dtype", nargs="+", choices=DTYPES, help="default: bfloat16, on a CPU float32 too")
    add("--backend", nargs="+", choices=["reference", "cpu", "triton", "cuda"], help="default: all there are")
    add("--models", nargs="+", choices=MODELS, help="default: the five real ones, on a CPU tinyllama")
    add("--rows", nargs="+", type=positive, help="of a batch, over all adapters; default: 8192, on a CPU 512")
    add("--adapters", nargs="+", type=positive, help="how many; default: 8, in `adapters` 1 to 64")
    add("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="of rows; default: both")
    add("--dropout", type=probability, default=0.1, help="default: 0.1")
    add("--rounds", type=positive, help="timed turns of each contender; default: 15")
    add("--threads", type=threads, help="of PyTorch on the CPU; default: PyTorch's own")
    add("--time-limit", type=seconds, metavar="SECONDS", help="start no row after this; results say so")
    add("--out", type=Path, metavar="FOLDER", help="write suite.json, suite.txt and suite.png there")
    add("--commit", help="of a source folder that is no git checkout, for the results")
    add("--check", action="store_true", help="compare every contender at every shape that is timed")
    add("--quick", action="store_true", help="tiny sizes, few rounds")
    add("--show", "--print", action="store_true", help="with `choose`: print the table, measure nothing")
    add("--write", action="store_true", help="with `choose`: write the table that the package carries")
    add("--from", dest="source", type=Path, metavar="JSON", help="with `choose --write`: an earlier result")
    return found


def positive(text: str) -> int:
    """An integer of at least 1."""
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return value


def threads(text: str) -> int:
    """As many as this machine has processors, at most: more only wait for each other."""
    value, most = positive(text), os.cpu_count() or 1
    if value > most:
        raise argparse.ArgumentTypeError(
            f"expected at most {most}, the processors of this machine, got {text}"
        )
    return value


def probability(text: str) -> float:
    """A number of at least 0 and below 1."""
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a probability with 0 <= p < 1, got {text}")
    return value


def complete(options: argparse.Namespace) -> tuple[Settings, dict[str, str]]:
    """Fill in the defaults of the device.

    Returns:
        The settings, and why backends that were not asked for by name are missing.

    Raises:
        ValueError: if the device or a backend that was asked for is not there.
    """
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"--device: expected cpu, cuda or cuda:<index>, got {options.device!r}") from error
    if device.type not in BACKENDS or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device: expected a device that this torch sees, got {device}")
    cpu = device.type == "cpu"
    reasons = {name: available(name, device) for name in options.backend or BACKENDS[device.type]}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    if missing and options.backend:
        raise ValueError(f"--backend: {'; '.join(missing.values())}")
    real = [name for name in MODELS if name != "quick"]
    models = ["quick"] if options.quick else ["tinyllama"] if cpu else real
    rows = [96] if options.quick else [512] if cpu else [8192]
    dtypes = options.dtype or (["float32"] if options.quick and cpu else ["float32", "bfloat16"][not cpu :])
    settings = Settings(
        device=device,
        dtypes=tuple(DTYPES[name] for name in dtypes),
        backends=tuple(name for name, reason in reasons.items() if reason is None),
        models=tuple(options.models or models),
        rows=tuple(options.rows or rows),
        adapters=tuple(options.adapters or []),
        layouts=tuple(options.layouts),
        dropout=options.dropout,
        rounds=options.rounds or (2 if options.quick else 15),
        quick=options.quick,
        check=options.check,
    )
    return settings, {f"backend {name}": reason for name, reason in missing.items()}


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
            report.write(options["out"] / "suite.json", data)
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
        if not plots.plot(data, options["out"] / "suite.png"):
            print("no plot: matplotlib is missing, or no section that has one was measured")
    return data


def main(arguments: Sequence[str] | None = None, program: str = "python bench/suite.py") -> int:
    """Run the command line.

    Args:
        arguments: those after the program's name; default: of this process.
        program: its name, in help and results.

    Returns:
        The exit code: 0, or 1 where something failed or was wrong.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    found = parser(program)
    options = found.parse_args(given)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        found.error(f"SECTION: expected of {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if (options.show or options.write) and options.sections != ["choose"]:
        found.error("--show and --write: expected the section choose alone")
    if options.show and options.write:
        found.error("--show and --write: expected one of them")
    if options.source and not options.write:
        found.error("--from: expected --write beside it")
    try:
        return dispatch(options, " ".join([program, *given]))
    except (ValueError, OSError) as error:
        found.error(str(error))


def dispatch(options: argparse.Namespace, command: str) -> int:
    """Show or write the table, or measure; returns the exit code."""
    if options.show:
        print("\n".join(choose.table()))
        return 0
    if options.source:
        print(f"{choose.write(choose.result_of(options.source))} entries written")
        return 0
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    settings, skipped = complete(options)
    sections = options.sections or list(SECTIONS)
    reason = choose.missing(settings)
    if reason and sections == ["choose"]:
        raise ValueError(f"choose: {reason}")
    if reason and "choose" in sections:
        sections.remove("choose")
        skipped["choose"] = reason
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
    if options.write:
        print(f"{choose.write(data)} entries written")
    return 1 if data["failed"] or not data["rows"] else 0
