"""Compare how fast two checkouts are, in turns on one machine: medians of the same work.

Usage: python .ci/same_speed.py BEFORE AFTER [--only GROUP ...] [--seconds 12]

BEFORE and AFTER are checkouts with their compiled libraries. A process of each builds the same cases from
its own `bench/`, and the two take turns. Prints milliseconds of both, and the ratio of AFTER to BEFORE.
Run it on a quiet machine. Groups:

linear     one layer with several adapters, forward and backward
train      steps of several adapters
stages     the same steps over two stages that are threads of one process
processes  `mlora train` of the quickstart over two stages that are processes and send over TCP
scheduler  64 tasks, where all fit under the limit and where some wait: a step, and the scheduler's own time
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

LAYERS = [(2048, 2048, 2048, 4), (2048, 1024, 1024, 4), (512, 1024, 1024, 8), (2048, 2048, 512, 4)]
"""Rows, inputs, outputs, adapters."""
STEPS = [(4, 1, 32), (4, 2, 64), (4, 8, 128), (64, 1, 16)]
"""Adapters, sequences of each, tokens of each."""
Case = Callable[[], dict[str, float]]
"""Runs once, and returns seconds by what was timed."""


def first_of(*modules: str) -> Any:
    """Returns the module that this checkout has; they were moved."""
    for name in modules[:-1]:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return import_module(modules[-1])


def timed(run: Callable[[], object]) -> Case:
    """Returns a case that times the second of two calls; the first fills the caches."""

    def case() -> dict[str, float]:
        run()
        begin = perf_counter()
        run()
        return {"": perf_counter() - begin}

    return case


def linear() -> dict[str, Case]:
    """Returns a layer of each shape and dtype; ATen multiplies by the frozen weight."""
    import torch

    contenders = first_of("linear.contenders", "contenders")
    balanced = first_of("linear.layouts", "layouts").balanced
    cases = {}
    for rows, d_in, d_out, adapters in LAYERS:
        for dtype in (torch.float32, torch.bfloat16):
            torch.ops.mlora_ext.set_base_gemm(dtype, "aten")
            lengths = balanced(rows, adapters)
            layer = contenders.Layer.random(lengths, [16] * adapters, d_in, d_out, dtype, 0.1)
            cases[f"{rows}x{d_in}x{d_out}x{adapters} {dtype}"] = timed(contenders.ours(layer))
    return cases


def train() -> dict[str, Case]:
    """Returns steps as `python -m bench train` makes them."""
    bench = first_of("training.train", "bench_train")
    cases = {}
    for adapters, sequences, length in STEPS:
        for dropout in (0.0, 0.1):
            ids = bench.batches(adapters, sequences, length)
            cases[f"{adapters}x{sequences}x{length} dropout {dropout}"] = timed(bench.ours(dropout, ids))
    return cases


def stages() -> dict[str, Case]:
    """Returns the same steps over two stages, threads of one process: no message goes over TCP."""
    bench = first_of("training.train", "bench_train")
    bench.Engine = functools.partial(bench.Engine, stages=2)
    return train()


def processes() -> dict[str, Case]:
    """Returns 60 steps of the quickstart's four adapters over two processes, each with one thread."""
    checkout, folder = Path(sys.argv[1]), Path(os.environ["SAME_SPEED_FOLDER"]) / "run"
    values = ["pipeline.stages=2", f"output_dir={folder}", "defaults.eval_steps=1000"]
    values += [f"adapters.{name}.max_steps=60" for name in ("sums", "reverse", "sort", "dates")]
    command = [sys.executable, "-m", "mlora", "train", str(checkout / "examples/quickstart.yaml")]
    command += ["--overwrite", *(word for value in values for word in ("--set", value))]

    def case() -> dict[str, float]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=2)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line["seconds"] for line in lines if "loss" in line and line["step"] > 10]
        return {" a step": statistics.median(steps)}

    return {"quickstart": case}


def scheduler() -> dict[str, Case]:
    """Returns turns of five iterations of a run as `python -m bench scheduler` makes it."""
    overhead = first_of("scheduler.overhead", "scheduler_overhead")
    runs = first_of("scheduler.run", "scheduler_run")
    config = first_of("scheduler.setup", "scheduler_setup", "scheduler.run").make_config
    folder = Path(os.environ["SAME_SPEED_FOLDER"])
    overhead.SHAPE.make().save_pretrained(folder / "base")
    cases = {}
    for name, limit in (("all fit", None), ("some wait", runs.room_for(overhead.TIGHT))):
        made = config(folder / "base", folder / name.replace(" ", "-"), overhead.WORK, limit=overhead.PLENTY)
        run = runs.TurnRun(made, limit)
        run.turn(overhead.LEARNING, decide=False)
        cases[name] = functools.partial(turn, run, runs.EACH)
    return cases


def turn(run: Any, calls: tuple[str, ...]) -> dict[str, float]:
    """Returns a step's seconds, those of the scheduler's calls inside of it, and those of a decision."""
    before = len(run.stopwatch.iterations)
    run.turn(5)
    passed = run.stopwatch.iterations[before:]
    steps = [one for one in passed if one.is_step and not one.measured]
    decided = [one.calls for one in passed if "decide" in one.calls]
    if not steps or not decided:
        return {}
    decisions = [sum(one.get(name, 0) for name in ("decide", "write_summary")) for one in decided]
    return {
        " a step per row": statistics.mean(one.seconds / one.rows for one in steps),
        " calls of a step": statistics.mean(sum(one.calls.get(name, 0) for name in calls) for one in steps),
        " a decision": statistics.mean(decisions),
    }


GROUPS: dict[str, Callable[[], dict[str, Case]]] = {
    each.__name__: each for each in (linear, train, stages, processes, scheduler)
}


def serve(checkout: Path, group: str) -> None:
    """Runs cases that standard input names, a line each; standard output gets their names, then seconds."""
    sys.path[:0] = [str(checkout / part) for part in ("bench", "python", "")]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    import mlora_ext

    assert Path(mlora_ext.__file__).is_relative_to(checkout), mlora_ext.__file__
    torch.set_num_threads(2)
    torch.manual_seed(0)
    first_of("mlora.cluster.allocators", "mlora.process.malloc").keep_freed_memory()
    cases = GROUPS[group]()
    print(json.dumps(list(cases)), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(cases[line.strip()]()), file=answers, flush=True)


class Server:
    """A process of one checkout.

    Attributes:
        cases: names of what it can run.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.cases: list[str] = json.loads(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with {self._process.wait()}: {self._process.args!r}")
        return line

    def run(self, case: str) -> dict[str, float]:
        """Returns seconds of one call, by what was timed."""
        assert self._process.stdin is not None
        print(case, file=self._process.stdin, flush=True)
        found: dict[str, float] = json.loads(self._answer())
        return found


@contextmanager
def server(checkout: Path, group: str, folder: Path) -> Iterator[Server]:
    """A process that serves a group's cases, until the block ends."""
    folder.mkdir()
    command = [sys.executable, __file__, str(checkout), "--serve", group]
    environment = os.environ | {"SAME_SPEED_FOLDER": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(str(checkout / part) for part in ("bench", "python", ""))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


def compare(before: Server, after: Server, case: str, seconds: float) -> None:
    """Runs a case in turns for about so many seconds, and prints medians."""
    begin = perf_counter()
    before.run(case), after.run(case)
    turns = max(8, min(400, round(seconds / (perf_counter() - begin))))
    found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    for number in range(turns):
        for index, server in sorted(enumerate((before, after)), reverse=bool(number % 2)):
            found[index].append(server.run(case))
    for part in found[0][0]:
        old, new = (statistics.median(one[part] for one in own if part in one) * 1e3 for own in found)
        print(f"{case + part:44s} {old:9.3f} {new:9.3f} ms  {new / old:.3f}  {turns} turns", flush=True)


def main() -> int:
    """Compares two checkouts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--seconds", type=float, default=12, help="for each case (default: 12)")
    parser.add_argument("--serve", choices=GROUPS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    checkouts = [path.resolve() for path in given.checkouts]
    if given.serve:
        serve(checkouts[0], given.serve)
        return 0
    if len(checkouts) != 2:
        parser.error("expected two checkouts: BEFORE AFTER")
    for group in given.only:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            servers = [
                stack.enter_context(server(checkout, group, Path(folder) / str(index)))
                for index, checkout in enumerate(checkouts)
            ]
            for case in servers[0].cases:
                compare(servers[0], servers[1], case, given.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
