"""The table of a run's tasks: which there are, which wait, and which are on the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlora.cluster.device import is_out_of_memory
from mlora.config.lora_fields import lora_warnings
from mlora.engine.engine import Engine
from mlora.engine.memory_limit import Candidate, MemoryLimit
from mlora.errors import RunError
from mlora.files.run_folder import RunFolder
from mlora.planning.memory_needs import memory_need
from mlora.planning.task_memory import TaskMemory
from mlora.queue.submission import submitted
from mlora.queue.task_queue import Request
from mlora.run.best import check_best_file
from mlora.run.report import Reporter, some
from mlora.run.set_aside import bring_back, restore_adapter, set_aside
from mlora.scheduler import NOBODY, Admission, MemoryNeed
from mlora.sweep.ranking import Proposal
from mlora.tasks.task import State, Task, TaskBuilder

if TYPE_CHECKING:
    from mlora.sweep.trials import Sweep

Unfit = Mapping[str, str] | None
"""Why tasks do not fit, by name, as a journaled decision says; None = check them now."""


class TaskTable:
    """The tasks of a run.

    Attributes:
        tasks: all but the refused.
        refused: why, by name.
        unfit: those of the refused that do not fit into memory.
        memory: None = there is no limit.
        admission: the admitted tasks and their groups.
    """

    def __init__(
        self,
        engine: Engine,
        builder: TaskBuilder,
        tasks: Sequence[Task],
        refused: Mapping[str, str],
        folder: RunFolder,
        reporter: Reporter,
        memory: MemoryLimit | None = None,
        sweep: Sweep | None = None,
    ) -> None:
        self.tasks, self.refused = list(tasks), dict(refused)
        self.unfit: dict[str, str] = {}
        self.memory, self._sweep = memory, sweep
        self._task_memory = TaskMemory(memory.adapters) if memory else None
        self.admission: Admission = NOBODY
        self._engine, self._builder, self._reporter, self._folder = engine, builder, reporter, folder
        self._waited: list[str] = []
        self._left: list[str] = []

    def named(self, name: str) -> Task | None:
        """Returns the task with this name, or None."""
        return next((task for task in self.tasks if task.name == name), None)

    def running(self) -> list[Task]:
        """Returns the tasks that have not ended and are not paused, admitted or waiting."""
        return [task for task in self.tasks if task.progress.state == "running"]

    def admitted(self) -> list[Task]:
        """Returns the tasks that are on the engine."""
        on_engine = set(self._engine.adapters)
        return [task for task in self.tasks if task.name in on_engine]

    def waiting(self) -> list[Task]:
        """Returns the tasks that would train if there were room."""
        return [task for task in self.running() if task.name not in self.admission.slots]

    def members(self) -> dict[int, list[Task]]:
        """Returns the running, admitted tasks of each group, by the group's slot."""
        found: dict[int, list[Task]] = {}
        for name, slot in self.admission.slots.items():
            task = self.named(name)
            if task is not None and task.progress.state == "running":
                found.setdefault(slot, []).append(task)
        return found

    def alive(self) -> list[Task]:
        """Returns the tasks that have not ended."""
        return [task for task in self.tasks if task.alive]

    def candidates(self) -> list[Task]:
        """Returns the running tasks that fit alone or have begun; the other tasks wait.

        If there are none, the processes release unused memory. Then tasks that barely fit are tried, and one
        of them runs alone. A task that only this process has no room for waits for a new process.
        """
        running = self.running()
        if self.memory is None or not running:
            return running
        begun = set(self._engine.adapters)
        fits, fits_barely = self.memory.fits, self.memory.fits_barely
        found = [t for t in running if t.kept is not None or t.name in begun or fits(self.candidate(t))]
        if found:
            return found
        self.memory.look_again([task.name for task in self.admitted()])
        found = [t for t in running if fits(self.candidate(t))]
        found = found or [t for t in running if fits_barely(self.candidate(t))]
        if not found:
            self._none_fits(running)
        return found

    def _none_fits(self, tasks: Sequence[Task]) -> None:
        """Refuses tasks that fit in no process, and warns that a new process may train the rest."""
        assert self.memory is not None
        for task in tasks:
            self._check(task)
        left = [task for task in tasks if task.name not in self.unfit]
        names = [task.name for task in left]
        if left and names != self._left:
            why = self.memory.no_room([self.candidate(task) for task in left])
            self._reporter.warn(f"{some(names)}: {why}: mlora resume {self._folder.path}")
        self._left = names

    def needs(self, tasks: Sequence[Task]) -> list[MemoryNeed]:
        """Returns the scheduler's view of tasks."""
        arrivals = {task.name: number for number, task in enumerate(self.tasks)}
        if self.memory is None:
            return [memory_need(task, arrivals[task.name]) for task in tasks]
        states = self.memory.adapters.admitted
        return [
            memory_need(task, arrivals[task.name], states(task.name), self.candidate(task).largest)
            for task in tasks
        ]

    def know(self, task: Task) -> None:
        """Tells the memory model of a task; raises ValueError if the base takes no such adapter."""
        assert self._task_memory is not None
        self._task_memory.know(task)

    def candidate(self, task: Task) -> Candidate:
        """Returns a task as the memory limit sees it."""
        assert self._task_memory is not None
        return self._task_memory.candidate(task)

    def look_at(self, tasks: Sequence[Task], unfit: Unfit) -> None:
        """Learns what new tasks need and refuses those that never fit, or those that `unfit` names."""
        if self.memory is None:
            return
        for task in [task for task in tasks if self._is_known(task)]:
            if unfit is not None:
                if task.name in unfit:
                    self.unfits(task, unfit[task.name])
                continue
            self._check(task)

    def _check(self, task: Task) -> None:
        """Refuses a task that never fits."""
        assert self.memory is not None
        try:
            self.memory.check(self.candidate(task))
        except ValueError as error:
            self.unfits(task, str(error))

    def _is_known(self, task: Task) -> bool:
        """Adds a task to the memory model; if the base takes no such adapter, refuses it. False = refused."""
        assert self.memory is not None
        try:
            self.know(task)
        except ValueError as error:
            self.unfits(task, str(error))
            return False
        return True

    def unfits(self, task: Task, message: str) -> None:
        """Refuses a task for which there is no room; it must not be on the engine."""
        self.unfit[task.name] = message.removeprefix(f"adapter {task.name!r}: ")
        self._refuse(task.name, self.unfit[task.name])

    def take(self, request: Request, unfit: Unfit) -> None:
        """Carries out a user's request, as far as still possible."""
        task = self.named(request.task)
        if request.kind == "submit":
            self._add(request.task, request.content, unfit)
        elif task is None or not task.alive:
            self._reporter.warn(f"{request.task}: {request.kind}: there is no such task in training")
        elif request.kind == "cancel":
            self._end(task, "cancelled", "")
        elif request.kind == "pause" and task.progress.state == "running":
            task.progress.state = "paused"
            self._reporter.changed(task)
        elif request.kind == "unpause" and task.progress.state == "paused":
            task.progress.state = "running"
            self._reporter.changed(task)

    def accept(self, proposal: Proposal, unfit: Unfit) -> None:
        """Carries out a proposal of the sweep: prunes a trial or begins the next one."""
        task = self.named(proposal.task)
        if proposal.trial is not None:
            self._add(proposal.task, proposal.trial, unfit)
        elif task is not None and task.alive:
            self._end(task, "pruned", "fell behind the other trials")

    def _add(self, name: str, content: Mapping[str, Any], unfit: Unfit) -> None:
        """Adds a submitted task or a trial, or refuses it."""
        task, told = None, len(self._builder.warnings)
        if self.named(name) is not None or name in self.refused:
            self._reporter.warn(f"{name}: submitted again under a name that is taken; left out")
        else:
            try:
                task = self._builder.build(*submitted(name, content))
            except RunError as error:
                self._refuse(name, str(error))
        if self._sweep and "trial" in content:
            self._reporter.note(f"{name}: {self._sweep.begun(content['trial'], task)}")
        if task is None:
            return
        for line in self._builder.warnings[told:]:
            self._reporter.warn(line)
        self.tasks.append(task)
        self.look_at([task], unfit)
        if task in self.tasks:
            self._reporter.joined(task, self.tasks)

    def _refuse(self, name: str, message: str) -> None:
        self.tasks = [task for task in self.tasks if task.name != name]
        self.refused[name] = message
        if self._sweep:
            self._sweep.taken_off(name)
        self._reporter.fault(f"{name}: refused: {message}")

    def _end(self, task: Task, state: State, message: str) -> None:
        if task.name in self._engine.adapters:
            self._engine.remove_adapter(task.name)
        task.progress.state, task.progress.message, task.kept = state, message, None
        if self._sweep:
            self._sweep.taken_off(task.name, pruned=state == "pruned")
        self._reporter.changed(task)

    def carry_out(self, admission: Admission) -> list[Task]:
        """Sets tasks aside and puts admitted ones on the engine; returns those that are new there."""
        for task in self.admitted():
            if task.name not in admission.slots:
                set_aside(self._engine, task, self._folder.states)
        self.admission = admission
        on_engine = set(self._engine.adapters)
        new = [task for task in self.running() if task.name in admission.slots and task.name not in on_engine]
        self._tell_who_waits()
        return [task for task in new if self._put_on(task)]

    def _tell_who_waits(self) -> None:
        waiting = [task.name for task in self.waiting()]
        if waiting != self._waited:
            went_on = [name for name in self._waited if name in self.admission.slots]
            self._waited = waiting
            self._reporter.waits(waiting, went_on)

    def restore(self, admission: Admission, kept: Mapping[str, str], adapters: Mapping[str, Any]) -> None:
        """Puts admitted tasks back on the engine; `kept` names the state files of the other tasks."""
        self.admission = admission
        for task in self.alive():
            task.kept = kept.get(task.name)
            check_best_file(task, self._folder.states)
            if task.name in admission.slots:
                if task.name not in adapters:
                    raise RunError(
                        f"{task.name}: cannot be restored: its checkpoint lacks adapters.{task.name}"
                    )
                restore_adapter(self._engine, task, admission.slots[task.name], adapters[task.name])
        self._tell_who_waits()

    def _put_on(self, task: Task) -> bool:
        begins = task.kept is None
        try:
            bring_back(self._engine, task, self.admission.slots[task.name], self._folder.states)
        except ValueError as error:
            if begins:
                self._refuse(task.name, str(error).removeprefix(f"adapter {task.name!r}: "))
            else:
                self._end(task, "stopped", str(error).removeprefix(f"{task.name}: "))
            return False
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(f"{task.name}: out of memory for its weights; lower lora.r") from error
        if begins and task.lora:
            for line in lora_warnings(self._engine.registry, task.name, task.lora):
                self._reporter.warn(line)
        return True
