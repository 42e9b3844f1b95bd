"""Test and measure on a machine with a CUDA GPU, from prebuilt libraries, in under nine minutes, offline.

    bench/gpu.sh --kit .gpu [--phases "NAME,..."] [--limit SECONDS] [--commit TEXT] OUT_FOLDER
    bench/gpu.sh --dry OUT_FOLDER        # every phase on a CPU with tiny sizes: its figures show nothing

`make gpu-kit` builds the kit. Phases come in the order of what they decide. Each has a time limit and writes
its lines at once into a log of OUT_FOLDER; `summary.txt` is written after each, so that what was finished
stays when this is killed. A phase that fails or runs out of time stops none after it; the exit code is 1
then, and the table at the end says which. A sanitizer that is missing or cannot watch the device is no
failure.
Needs Python with torch >= 2.11, triton, transformers, peft, pytest and pytest-timeout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 530
"""Seconds of all phases; the rest of nine minutes is for what comes before and after."""
TESTS = r"\d+ passed"
PRODUCTS = r"^  (forward|dX|vendor|ours|eight|\d+ read).*|^\d+ x .*|^the kit .*"
SANITIZED = r"\d+ cases, \d+ wrong|SUMMARY"


@dataclass(frozen=True)
class Phase:
    """One command.

    Attributes:
        name: several phases may share one.
        seconds: at most; where fewer are left, these.
        log: to which its output is added.
        shows: the summary repeats lines that match; a phase that prints none has failed.
        command: after `python`; `{seconds}` becomes somewhat fewer than it has, `{kit}` and `{out}` folders.
        dry: what stands in for it on a CPU.
        environment: variables that are added.
    """

    name: str
    seconds: int
    log: str
    shows: str
    command: str
    dry: str
    environment: dict[str, str] = field(default_factory=dict)


def pytest(*words: str, marks: str = "gpu") -> str:
    """The command line of some tests, which end by themselves before their limit and say what failed."""
    return f"-m pytest -m '{marks}' --timeout 120 --session-timeout {{seconds}} -rfEs {' '.join(words)}"


def phases(kit: Path, processes: int) -> Iterator[Phase]:
    """Yields all phases, in their order.

    Args:
        kit: the folder whose variants are timed in turn: base, the others, base again; base with products of
            its own, too.
        processes: for tests; 1 where pytest-xdist is missing.
    """
    tests = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # so that cuBLAS repeats its bits
    parallel = f"-n {processes}" if processes > 1 else ""
    plain = "not nightly and not gpu"
    some = pytest("tests/ext/test_reference.py", marks=plain)
    yield Phase(
        "libraries", 60, "checks.log", "libraries: .*",
        "-m bench gpu-kit --install {kit}", "-m bench gpu-kit --load",
    )  # fmt: skip
    odd = "-m bench gpu-sanitize --device cpu"
    yield Phase("odd shapes", 90, "checks.log", SANITIZED, "-m bench gpu-sanitize", odd)
    yield Phase(
        "products", 240, "products.log", PRODUCTS,
        "-m bench gpu-products --kit {kit} --limit {seconds}", "-m bench gpu-products --dry",
    )  # fmt: skip
    timed = sorted(path.parts[-3] for path in (kit / "variants").glob("*/mlora_ext/libmlora_ops.so"))
    others = [name for name in timed if name != "base"]
    runs = [("base", "mlora"), ("base", "cublas"), *((name, None) for name in others)]
    for name, library in [*runs, *([("base", "cublas")] if others else [])]:
        yield Phase(
            "launches", 75, "launches.log", "^(library|mixed|all) .*",
            f"-m bench gpu-launches --json {{out}}/launches.jsonl "
            f"--library {{kit}}/variants/{name}/mlora_ext/libmlora_ops.so"
            + (f" --base-gemm {library}" if library else ""),
            "-m bench gpu-launches --json {out}/launches.jsonl --dry",
        )  # fmt: skip
    yield Phase(
        "suite", 240, "suite.log", "^(seven linears|FAILED|skipped|out of time) .*",
        "-m bench suite fused linears adapters decoder ablation operators step --check --device cuda "
        "--base-gemm fastest "
        "--models llama-2-7b llama-3-70b --time-limit {seconds} --commit '{commit}' --out {out}",
        "-m bench suite fused linears adapters decoder --quick --rounds 1 --layouts balanced --threads 1 "
        "--device cpu --time-limit {seconds} --commit '{commit}' --out {out}",
    )  # fmt: skip
    yield Phase(
        "suite", 60, "suite.log", "^(seven linears|FAILED|skipped|out of time) .*",
        "-m bench suite fused linears --base-gemm cublas --device cuda --models llama-2-7b "
        "--time-limit {seconds} --commit '{commit}' --out {out}/cublas",
        "-m bench suite linears --quick --rounds 1 --layouts balanced --threads 1 --device cpu "
        "--time-limit {seconds} --commit '{commit}' --out {out}/cublas",
    )  # fmt: skip
    yield Phase(
        "captured step", 60, "checks.log", "^captured.*", "-m bench gpu-graph", "-m bench gpu-graph --dry"
    )
    yield Phase("tests of the suite", 60, "tests.log", TESTS, pytest("tests/bench/test_suite_gpu.py"), some)
    two = "-m torch.distributed.run --standalone --nproc-per-node 2"
    pipeline = f"{two} bench/__main__.py gpu-overlap --out {{out}}/pipeline"
    yield Phase("pipeline", 60, "checks.log", '"largest_loss_error".*', pipeline, f"{pipeline} --device cpu")
    yield Phase(
        "tests", 150, "tests.log", TESTS,
        pytest(
            parallel,
            "--continue-on-collection-errors tests/ext tests/cuda tests/mlora/model tests/mlora/store",
        ),
        some, tests,
    )  # fmt: skip
    kinds = [
        "heads",
        "experts",
        "target_parameters",
        "lora_fa",
        "row_norms",
        "kinds_in_folders",
        "quantized_bases",
    ]
    kinds = ["mixed_kinds", "initialisations", *kinds]
    yield Phase(
        "kinds of adapters", 90, "tests.log", TESTS,
        pytest("--device cuda", parallel, *(f"tests/ext/test_{name}.py" for name in kinds), marks=plain),
        pytest("tests/ext/test_lora_fa.py", marks=plain), tests,
    )  # fmt: skip
    whole = ["all_kinds", "trained_heads", "run_initialisations", "quantized_runs"]
    yield Phase(
        "runs", 90, "tests.log", TESTS,
        pytest(parallel, *(f"tests/mlora/run/test_{name}.py" for name in whole), marks=plain),
        pytest("tests/mlora/run/test_trained_heads.py", marks=plain), tests | {"MLORA_TESTS_DEVICE": "cuda"},
    )  # fmt: skip
    train = "-m mlora train examples/quickstart.yaml --overwrite --set defaults.eval_exact_match=false"
    for key, library in (("bf16", "fastest"), ("fp16", "mlora")):
        yield Phase(
            "16-bit runs", 100, "tests.log", "^.* finished .*",
            f"{train} --set {key}=true --set output_dir={ROOT}/runs/gpu-{key} --set device=cuda "
            f"--set base_gemm={library}",
            f"{train} --set {key}=true --set output_dir={ROOT}/runs/gpu-{key} "
            "--set defaults.max_steps=2 --set adapters.reverse.max_steps=2 --set adapters.sort.max_steps=2",
        )  # fmt: skip
    limit = pytest("-s tests/mlora/planning/test_limit_gpu.py")
    yield Phase("memory limit", 60, "tests.log", TESTS, limit, some)
    for tool in ("memcheck", "racecheck"):
        # without PyTorch's cache every tensor is an allocation of its own
        yield Phase(
            tool,
            150,
            "checks.log",
            SANITIZED,
            "-m bench gpu-sanitize",
            odd,
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )


class Call:
    """Goes through phases, and keeps the table of how they ended."""

    def __init__(self, options: argparse.Namespace, about: list[str]) -> None:
        self.options, self.about, self.table, self.failed = options, about, list[str](), False
        self.begin, self.shown = time.monotonic(), list[str]()

    def note(self, name: str, state: str, seconds: float, why: str = "") -> None:
        """Adds a line to the table, and writes the summary."""
        self.failed |= state in ("FAILED", "TIMEOUT") or why == "no time left"
        self.table.append(f"{name:22} {state:8} {seconds:4.0f}s  {why}".rstrip())
        title = f"bench/gpu.sh{' --dry' if self.options.dry else ''}: {time.monotonic() - self.begin:.0f} s"
        text = [*self.about, title, *self.table, *self.shown]
        (self.options.out / "summary.txt").write_text("\n".join(text) + "\n")

    def run(self, phase: Phase) -> None:
        """Runs one phase, for at most its time or what is left."""
        seconds = min(phase.seconds, int(self.options.limit - (time.monotonic() - self.begin)))
        prefix = [sys.executable]
        if phase.name in ("memcheck", "racecheck") and not self.options.dry:
            sanitizer = shutil.which("compute-sanitizer", path=self.environment(phase)["PATH"])
            if sanitizer is None:
                self.note(phase.name, "NOT RUN", 0, "compute-sanitizer is not on PATH")
                return
            prefix = [sanitizer, "--tool", phase.name, "--error-exitcode", "1", *prefix]
        if seconds < 5:
            self.note(phase.name, "NOT RUN", 0, "no time left")
            return
        text = phase.dry if self.options.dry else phase.command
        places = {"kit": self.options.kit, "out": self.options.out, "commit": self.options.commit}
        words = [word.format(seconds=int(0.85 * seconds) - 3, **places) for word in shlex.split(text)]
        begin, log = time.monotonic(), self.options.out / phase.log
        print(f"== {phase.name} (at most {seconds} s): {shlex.join(words)}", flush=True)
        with log.open("a+") as file:
            file.write(f"== {phase.name}: {shlex.join(words)}\n")
            file.flush()
            start = file.tell()
            code = ended([*prefix, *words], seconds, file, self.environment(phase))
            file.seek(start)
            lines = file.read().splitlines()
        print("\n".join(lines[-4:]), flush=True)
        found = [match[0] for line in lines if (match := re.search(phase.shows, line))]
        self.shown += [f"{phase.name}: {line}" for line in found]
        took = time.monotonic() - begin
        if code is None:
            self.note(phase.name, "TIMEOUT", took, f"after {seconds} s, see {phase.log}")
        elif prefix[0] != sys.executable and any("Device not supported" in line for line in lines):
            self.note(phase.name, "NOT RUN", took, "compute-sanitizer does not support this device here")
        elif code or not found:
            why = f"exit code {code}" if code else f"nothing matches {phase.shows}"
            self.note(phase.name, "FAILED", took, f"{why}, see {phase.log}")
        else:
            self.note(phase.name, "ok", took)

    def environment(self, phase: Phase) -> dict[str, str]:
        """What a phase's process gets; the wheels' packages come last."""
        path = os.pathsep.join(map(str, (ROOT, ROOT / "python", self.options.kit / "site")))
        # where CUDA's tools lie when nobody has put them on PATH
        tools = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
        own = {"PATH": tools, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        return {**os.environ, **own, **phase.environment}


def ended(command: Sequence[str], seconds: int, log: TextIO, environment: dict[str, str]) -> int | None:
    """Runs a command in a process group of its own; returns its exit code, or None if it was ended."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where this process is told to end, and for children that a phase has left behind
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with suppress(subprocess.TimeoutExpired):  # the driver may hold a process whose GPU hangs
                process.wait(5)


def about(dry: bool, commit: str) -> list[str]:
    """What this runs on, for the summary; exits where torch sees no GPU."""
    sees = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if not dry and subprocess.run([sys.executable, "-c", sees], timeout=180).returncode:
        sys.exit("bench/gpu.sh: this torch sees no CUDA device; --dry tries the phases without one")
    found = [f"commit {commit}", f"Python {sys.version.split()[0]}"]
    for name in ("torch", "triton", "transformers", "peft", "pytest", "pytest-timeout"):
        try:
            found[1] += f", {name} {version(name)}"
        except PackageNotFoundError:
            found[1] += f", {name} missing"
    if not dry and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found.append(subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip())
    return found


def arguments(given: Sequence[str] | None) -> tuple[argparse.Namespace, list[Phase]]:
    """The command line, and the phases that it chose."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER", help="of logs and results; others there stay")
    parser.add_argument(
        "--kit", type=Path, default=ROOT / ".gpu", help="that `make gpu-kit` built; default: .gpu"
    )
    parser.add_argument("--phases", help="these only, with commas between; default: all")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds of all phases; default: {LIMIT}")
    parser.add_argument("--commit", help="of the kit's base; default: as the kit says")
    parser.add_argument("--dry", action="store_true", help="on a CPU, tiny")
    options = parser.parse_args(given)
    options.kit, about_kit = options.kit.resolve(), options.kit / "kit.json"
    if not options.dry and not about_kit.exists():
        parser.error(f"--kit: {options.kit} holds no kit; `make gpu-kit` builds one")
    if not options.commit:
        options.commit = json.loads(about_kit.read_text())["commit"] if about_kit.exists() else "unknown"
    processes = min(12, os.cpu_count() or 1) if find_spec("xdist") and not options.dry else 1
    found = list(phases(options.kit, processes))
    known = list(dict.fromkeys(phase.name for phase in found))
    chosen = options.phases.split(",") if options.phases else known
    for name in chosen:
        if name not in known:
            parser.error(f"--phases: no phase '{name}'; there are {','.join(known)}")
    return options, [phase for phase in found if phase.name in chosen]


def main(given: Sequence[str] | None = None) -> int:
    """Goes through the phases; returns the exit code."""
    options, chosen = arguments(given)
    found = about(options.dry, options.commit)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in {phase.log for phase in chosen} | {"launches.jsonl"}:
        (options.out / name).unlink(missing_ok=True)
    call = Call(options, found)
    for phase in chosen:
        call.run(phase)
    print((options.out / "summary.txt").read_text(), end="")
    return 1 if call.failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the phase under way is ended, too
    raise SystemExit(main())
