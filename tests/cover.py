"""Which tests run before each change: every quick one, and of the slow ones a cover of the lines they reach.

`make cover` runs all tests under `coverage`, in each process that they start, and writes `LEFT`: the slow
tests that add no line. `make test` leaves them out; `make nightly` runs them. A new test runs until the next
`make cover`.

Coverage sees Python only. So of the files that test kernels, each test function has a part in the cover.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT = Path(__file__).with_name("left_to_the_night.txt")
FOLDER = ROOT / "build" / "cover"
QUICK = 0.35  # seconds; those that are quicker take a tenth of the time of all
KERNELS = re.compile(r"tests/(cuda/|ext/test_(operator|cpu_kernels|gpu_sizes|expert_operator)\b)")
TOLD_BY_IMPORTS = "tests/mlora/cli/test_cli_mistakes.py::test_help_and_version_import_nothing_slow"
"""Fails under `coverage`, which imports."""
SETTINGS = f"""[run]
source = {ROOT / "mlora_ext"}, {ROOT / "python" / "mlora"}
data_file = {FOLDER / "data"}
parallel = true
sigterm = true
context = ${{PYTEST_CURRENT_TEST}}
patch = subprocess, _exit
"""
Lines = frozenset[Any]
"""Files and lines that a test reaches."""


def leave_to_the_night(items: Iterable[pytest.Item]) -> None:
    """Marks the tests that `LEFT` names."""
    left = set(LEFT.read_text(encoding="utf-8").splitlines()) if LEFT.exists() else set()
    for item in items:
        if item.nodeid in left:
            item.add_marker("left")


class Contexts:
    """A plugin that notes which test reaches a line, and how long each takes."""

    def __init__(self, config: pytest.Config) -> None:
        from coverage import Coverage

        self._seconds: Counter[str] = Counter()
        self._leads = not hasattr(config, "workerinput")
        self._coverage = Coverage(config_file=str(FOLDER / "settings"), data_suffix=True, context=None)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        return (yield)  # type: ignore[misc]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        if self._leads:
            (FOLDER / "seconds.json").write_text(json.dumps(self._seconds))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Contexts(config))


def lines_of_tests() -> dict[str, set[Any]]:
    """Returns the files and lines that each test has reached, in all processes."""
    found: dict[str, set[Any]] = {}
    for file in FOLDER.glob("data.*"):
        with sqlite3.connect(file) as data:
            tests = dict(data.execute("select id, context from context"))
            for source, test, bits in data.execute("select file_id, context_id, numbits from line_bits"):
                (path,) = data.execute("select path from file where id = ?", [source]).fetchone()
                name = re.sub(r" \((setup|call|teardown)\)$", "", tests[test])
                lines = (8 * i + j for i, byte in enumerate(bits) for j in range(8) if byte >> j & 1)
                found.setdefault(name, set()).update((path, line) for line in lines)
    return found


def left_out(lines: Mapping[str, set[Any]], seconds: Mapping[str, float]) -> list[str]:
    """Returns the slow tests that add nothing to the others: those are chosen greedily, by lines a second."""
    wanted = {test: lines.get(test, set()) | _itself(test) for test in seconds}
    chosen = {test for test in seconds if seconds[test] < QUICK}
    seen = set().union(*(wanted[test] for test in chosen))
    waiting = [(-len(wanted[test] - seen) / seconds[test], test) for test in seconds if test not in chosen]
    heapq.heapify(waiting)
    while waiting:
        _, test = heapq.heappop(waiting)
        gain = -len(wanted[test] - seen) / seconds[test]
        if not gain:
            continue
        if waiting and gain > waiting[0][0]:
            heapq.heappush(waiting, (gain, test))
        else:
            chosen.add(test)
            seen |= wanted[test]
    return sorted(seconds.keys() - chosen)


def _itself(test: str) -> set[Any]:
    return {test.partition("[")[0]} if KERNELS.match(test) else set()


def main(options: list[str]) -> int:
    """Runs all tests with pytest's `options`, and writes `LEFT` if they pass.

    Options that choose some tests would bring all others back into `make test`.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / "settings").write_text(SETTINGS)
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "COVERAGE_PROCESS_START": str(FOLDER / "settings")}
    which = "not soak and not gpu and not nightly and not peers"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "cover",
        "-m",
        which,
        "--deselect",
        TOLD_BY_IMPORTS,
        *options,
    ]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code == 0:
        seconds = json.loads((FOLDER / "seconds.json").read_text())
        left = left_out(lines_of_tests(), seconds)
        LEFT.write_text("".join(f"{test}\n" for test in left))
        kept = sum(seconds.values()) - sum(seconds[test] for test in left)
        print(f"{len(left)} of {len(seconds)} tests are left to the night; the others took {kept:.0f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
