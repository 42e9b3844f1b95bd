"""A run's tasks as its files describe them, and what users ask for: submit, cancel, stop, pause, unpause.

Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlora.config.aliases import nearest
from mlora.config.run_config import RunConfig
from mlora.errors import RunError
from mlora.store.queue import RequestType, TaskQueue
from mlora.store.run_folder import RunFolder, is_running
from mlora.store.stored_config import stored_adapter
from mlora.store.submission import check_name, read_submission

Change = Literal["cancel", "stop", "pause", "unpause"]
PATIENCE = 5.0  # seconds for a new run to take its folder, remove an earlier run, and write its config
_WORDS = {"cancel": "be cancelled", "stop": "be stopped", "pause": "be paused", "unpause": "continue"}

ENDED = ("finished", "stopped", "cancelled", "pruned", "refused")
BECOMES = {"pause": "paused", "unpause": "running", "cancel": "cancelled", "stop": "finished"}


@dataclass
class KnownTask:
    """A task of a run.

    Attributes:
        priority: in the run's YAML, or in the task's own.
        state: ``running`` (the run may be dead), ``waiting`` for memory, ``queued`` if the run has not taken
            its submission, ``paused``, ``finished``, ``stopped``, ``cancelled``, ``pruned`` or ``refused``.
        max_steps: from its submission; None if that sets none.
        asked: requests that the run has not taken, without its submission.
        view: what the run has published of it.
    """

    name: str
    priority: int
    state: str = "running"
    max_steps: int | None = None
    asked: list[RequestType] = field(default_factory=list)
    view: Mapping[str, Any] = field(default_factory=dict)

    @property
    def will_be(self) -> str:
        """Its state once the run has taken all requests."""
        state = "running" if self.state in ("waiting", "queued") else self.state
        for kind in self.asked:
            if state not in ENDED:
                state = BECOMES[kind]
        return state


def known_tasks(
    own: Iterable[tuple[str, int]], summary: Mapping[str, Any] | None, queue: TaskQueue | None
) -> dict[str, KnownTask]:
    """Returns a run's tasks by name: those of its config first, then the submitted ones in their order.

    `own` are the names and priorities of the config's tasks. Raises RunError if the queue cannot be read.
    """
    tasks = {name: KnownTask(name, priority) for name, priority in own}
    taken, requests = (queue.taken(), queue.requests()) if queue else (0, [])
    views = queue.views()[0] if queue else {}
    for request in requests:
        if request.kind == "submit":
            adapter = stored_adapter(request.task, request.content.get("adapter", {}))
            state, most = "running" if request.number <= taken else "queued", adapter.get("max_steps") or 0
            task = KnownTask(request.task, adapter.get("priority") or 0, state, most if most > 0 else None)
            tasks.setdefault(request.task, task)
        elif request.number > taken and request.task in tasks:
            tasks[request.task].asked.append(request.kind)
    for name, entry in (summary["adapters"] if summary else {}).items():
        task = tasks.setdefault(name, KnownTask(name, 0))
        if task.state != "queued":
            task.state = entry["state"]
    for name, view in views.items():
        if name in tasks:
            tasks[name].view = view
            if tasks[name].state == "running" and view.get("state") == "waiting":
                tasks[name].state = "waiting"
    return tasks


def submit(run_dir: Path | str, files: Sequence[Path]) -> list[str]:
    """Submits tasks, a YAML file each: all of them, or none if one is wrong; returns lines for the user.

    Raises RunError if there is no run, a file is wrong, a name is taken, or the queue cannot be written.
    """
    folder, config = _run(run_dir)
    with TaskQueue(folder.queue) as queue:
        before = _tasks(folder, config, queue)
        contents: dict[str, dict[str, Any]] = {}
        owners: dict[str, Path] = {}
        for path in files:
            content = read_submission(path, config, before)
            name = content["adapter"]["name"]
            other = owners.get(name.casefold())
            if other is not None:
                what = "is given twice" if other == path else f"name: {other} uses the same name"
                raise RunError(f"{path}: {what}; each task needs its own name")
            contents[name], owners[name.casefold()] = content, path
        with queue.alone():
            now = _tasks(folder, config, queue)  # another process may have submitted some meanwhile
            for path, (name, content) in zip(files, contents.items(), strict=True):
                check_name(name, now, str(path))
                queue.ask("submit", name, content)
    return [*(f"{name}: submitted" for name in contents), outlook(folder)]


def change(run_dir: Path | str, kind: Change, names: Sequence[str]) -> list[str]:
    """Asks a run to change the state of tasks: all, or none if one is wrong; returns lines for the user.

    A change that is already made or requested is not requested again; a line says so. Raises RunError if
    there is no run or no such task, a task has ended, or the queue cannot be written.
    """
    folder, config = _run(run_dir)
    with TaskQueue(folder.queue) as queue, queue.alone():
        tasks = _tasks(folder, config, queue)
        chosen = [_chosen(tasks, name, kind) for name in dict.fromkeys(names)]
        asked = [task for task in chosen if task.will_be != BECOMES[kind]]
        for task in asked:
            queue.ask(kind, task.name)
    return [*(_line(task, kind) for task in chosen), *([outlook(folder)] if asked else [])]


def _run(run_dir: Path | str) -> tuple[RunFolder, RunConfig]:
    folder = RunFolder(Path(run_dir).resolve())
    end = time.monotonic() + PATIENCE
    while os.path.isdir(folder.path) and not folder.config.is_file():
        if is_running(folder.metrics) is False or time.monotonic() > end:
            raise RunError(
                f"{folder.path}: is not a run folder: it has no config.yaml; if the run has just started, "
                "try again when it has loaded its base model"
            )
        time.sleep(0.02)
    folder.check_is_run()
    return folder, folder.read_config()


def _tasks(folder: RunFolder, config: RunConfig, queue: TaskQueue) -> dict[str, KnownTask]:
    own = [(adapter.name, adapter.priority) for adapter in config.adapters]
    return known_tasks(own, folder.read_summary(), queue)


def _chosen(tasks: dict[str, KnownTask], name: str, kind: Change) -> KnownTask:
    if name not in tasks:
        raise RunError(f"{name}: the run has no such task; {nearest(name, list(tasks), 'its tasks')}")
    task = tasks[name]
    if task.will_be in ENDED and task.will_be != BECOMES[kind]:
        asked = next((kind for kind in task.asked if BECOMES.get(kind) in ENDED), "cancel")
        how = f"it is already {task.state}" if task.state in ENDED else f"{asked} was already requested"
        more = "; submit it again under another name" if kind == "unpause" else ""
        raise RunError(f"{name}: cannot {_WORDS[kind]}: {how}{more}")
    return task


def _line(task: KnownTask, kind: Change) -> str:
    if task.will_be != BECOMES[kind]:
        return f"{task.name}: will {_WORDS[kind]}"
    if kind == "unpause":
        return f"{task.name}: is not paused"
    if task.state == BECOMES[kind]:
        return f"{task.name}: is already {task.state}"
    return f"{task.name}: {kind} was already requested"


def outlook(folder: RunFolder) -> str:
    """Returns a line that says who applies the requests: the active run, or `mlora resume`."""
    active, later = is_running(folder.metrics), f"`mlora resume {folder.path}` applies this"
    if active is None:
        return f"the run, if it is active, applies this at its next iteration; if it is not, {later}"
    if active:
        return "the run is active and applies this at its next iteration"
    return f"the run is not active; {later}"
