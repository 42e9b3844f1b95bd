"""Shows a run on a terminal: a row for each adapter, as far as there is room, and a line of totals."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from mlora.errors import visible
from mlora.run.reporter import Pace, Reporter, labels_told
from mlora.tasks.task import Progress, Task

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

TITLES = ("adapter", "state", "step", "loss", "eval loss", "accuracy", "tokens/s", "ETA")
GAP = 2  # columns between two cells
FIRST = ("running", "stopped", "waiting", "paused")
"""States of the rows to show first, in this order, where not all rows have room."""


def short_names(names: Sequence[str], width: int) -> list[str]:
    """Shortens names in their middle to at most `width` characters so that they still differ.

    If no cut keeps them apart, the shortened names begin with their number.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    half = width // 2
    for head in sorted(range(width), key=lambda head: abs(head - half)):
        cut = [_cut(name, head, width) for name in names]
        if len(set(cut)) == len(names):
            return cut
    return [_cut(f"{place} {name}", len(f"{place} "), width) for place, name in enumerate(names, 1)]


def _cut(name: str, head: int, width: int) -> str:
    if len(name) <= width:
        return name
    return f"{name[:head]}…{name[len(name) - max(width - head - 1, 0) :]}"


def _accuracy(progress: Progress) -> str:
    """Returns the share of right labels, or of pairs in the right order: of the latest evaluation or step."""
    found = {f"eval_{name}": value for name, value in progress.metrics.items()}
    found |= progress.evaluations[-1] if progress.evaluations else {}
    share = found.get("eval_accuracy", found.get("eval_rewards/accuracies"))
    return "" if share is None else f"{share:.1%}"


class LiveTable(Reporter):
    """A table of the adapters that is redrawn while the run goes on.

    If the terminal has too few lines, adapters in training come first, and the last line counts the hidden
    ones.
    """

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(highlight=False)
        self._tasks: Sequence[Task] = ()
        self._waiting = frozenset[str]()
        self._pace = Pace()
        self._drawn = 0.0
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True)

    def start(self, tasks: Sequence[Task]) -> None:
        """Starts to draw, and prints the labels of the tasks' heads above the table."""
        self._tasks = tasks
        self._live.start()
        self._tell_labels(tasks)
        self._draw()

    def step(self, task: Task, record: dict[str, Any]) -> None:
        """Redraws, at most five times a second."""
        self._pace.add(task.name, record["tokens"], record["seconds"])
        if time.monotonic() - self._drawn > 0.2:
            self._draw()

    def evaluation(self, task: Task, record: dict[str, Any]) -> None:
        """Redraws."""
        self._draw()

    def joined(self, task: Task, tasks: Sequence[Task]) -> None:
        """Redraws with one more row, and prints the labels of the new task's head above the table."""
        self._tasks = tasks
        self._tell_labels([task])
        self._draw()

    def _tell_labels(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            labels = labels_told(task)
            if labels:
                self.note(f"{task.name}: {labels}")

    def changed(self, task: Task) -> None:
        """Redraws, and prints a fault above the table."""
        if task.progress.state == "stopped":
            self.fault(f"{task.name}: stopped at step {task.progress.step}: {task.progress.message}")
        self._draw()

    def waits(self, names: Sequence[str], went_on: Sequence[str]) -> None:
        """Redraws."""
        self._waiting = frozenset(names)
        self._draw()

    def note(self, line: str) -> None:
        """Prints a line above the table."""
        self._console.print(visible(line), markup=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Prints a warning above the table."""
        self._console.print(f"warning: {visible(line)}", style="yellow", markup=False, soft_wrap=True)

    def fault(self, line: str) -> None:
        """Prints a fault above the table."""
        self._console.print(f"error: {visible(line)}", style="red", markup=False, soft_wrap=True)

    def close(self) -> None:
        """Removes the table."""
        self._live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(self._view(), refresh=True)

    def _view(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        width, height = self._console.size
        states = {task.name: self._state(task) for task in self._tasks}
        totals = self._totals(states, len(self._tasks))
        rows = height - 2 - len(totals) // width - 1  # the titles, and a line for the cursor
        shown = self._chosen(states, rows)
        if len(shown) < len(self._tasks):
            totals = self._totals(states, len(shown))
        cells = [self._cells(task, states[task.name]) for task in shown]
        used = [title != "accuracy" or any(row[i] for row in cells) for i, title in enumerate(TITLES[1:])]
        titles = (TITLES[0], *compress(TITLES[1:], used))
        cells = [list(compress(row, used)) for row in cells]
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        for column, title in enumerate(titles):
            table.add_column(title, justify="left" if column < 2 else "right", no_wrap=True)
        widths = [max(map(len, column)) + GAP for column in zip(titles[1:], *cells, strict=True)]
        names = short_names([task.name for task in self._tasks], max(width - sum(widths), 8))
        label = dict(zip(states, names, strict=True))
        for task, row in zip(shown, cells, strict=True):
            table.add_row(label[task.name], *row)
        return Group(table, Text(totals))

    def _state(self, task: Task) -> str:
        waits = task.progress.state == "running" and task.name in self._waiting
        return "waiting" if waits else task.progress.state

    def _chosen(self, states: dict[str, str], most: int) -> list[Task]:
        """Returns the tasks that have a row, in the run's order."""
        if len(self._tasks) <= most:
            return list(self._tasks)
        ranks = [FIRST.index(s) if s in FIRST else len(FIRST) for s in states.values()]
        order = sorted(range(len(ranks)), key=lambda place: ranks[place])
        return [self._tasks[place] for place in sorted(order[: max(most, 1)])]

    def _totals(self, states: dict[str, str], shown: int) -> str:
        """Returns a line: how many adapters are in each state, their steps and their speed."""
        counts = Counter(states.values())
        told = ", ".join(f"{count} {state}" for state, count in counts.most_common())
        made, steps = (
            sum(task.progress.step for task in self._tasks),
            sum(task.total_steps for task in self._tasks),
        )
        speeds = [self._pace.tokens_per_second(name) or 0.0 for name, s in states.items() if s == "running"]
        hidden = f", {len(states) - shown} not shown" if shown < len(states) else ""
        adapters = "1 adapter" if len(states) == 1 else f"{len(states)} adapters"
        return f"{adapters}: {told}{hidden}; {made} of {steps} steps, {sum(speeds):.0f} tokens/s"

    def _cells(self, task: Task, state: str) -> list[str]:
        """Returns a row without its name."""
        progress, evaluations = task.progress, task.progress.evaluations
        speed = self._pace.tokens_per_second(task.name) if state == "running" else None
        return [
            state,
            f"{progress.step}/{task.total_steps}",
            "" if progress.loss is None else f"{progress.loss:.4f}",
            f"{evaluations[-1]['eval_loss']:.4f}" if evaluations else "",
            _accuracy(progress),
            "" if speed is None else f"{speed:.0f}",
            self._pace.left(task, self._tasks) if state == "running" else "",
        ]
