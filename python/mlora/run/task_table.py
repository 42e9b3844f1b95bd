"""The table of a run's tasks: which wait, which are on the engine, and what memory allows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mlora.cluster.signals import Interrupted
from mlora.config.lora_fields import lora_warnings
from mlora.config.sweep_config import is_trial
from mlora.engine.engine import Engine
from mlora.errors import RunError, reason_of
from mlora.memory.estimate import MemorySample
from mlora.memory.room import MemoryLimit, within
from mlora.planning.task_memory import know_task, memory_need
from mlora.run.reporter import Reporter, some
from mlora.run.task_states import bring_back, restore_adapter, save_result, set_aside
from mlora.scheduler import NOBODY, Admission, MemoryNeed, next_batch
from mlora.store.queue import Request
from mlora.store.run_folder import RunFolder
from mlora.store.submission import submitted
from mlora.sweep.ranking import Proposal
from mlora.tasks.groups import Group
from mlora.tasks.task import State, Task, TaskBuilder, check_loss
from mlora_ext.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from mlora.sweep.trials import Sweep


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
        self.memory, self.sweep = memory, sweep
        self.admission: Admission = NOBODY
        self.engine, self._builder, self.reporter, self.folder = engine, builder, reporter, folder
        self._waited: list[str] = []
        self._left: list[str] = []
        self._stopped: list[Task] = []  # on request; `carry_out` saves them
        self.stopping: Callable[[], bool] = lambda: False
        """Whether a signal asks the run to end: then the resume takes what is left to take."""

    @property
    def warnings(self) -> list[str]:
        """Lines on the tasks' data and adapter folders."""
        return self._builder.warnings

    def named(self, name: str) -> Task | None:
        """Returns the task with this name, or None."""
        return next((task for task in self.tasks if task.name == name), None)

    def running(self) -> list[Task]:
        """Returns the tasks that have not ended and are not paused, admitted or waiting."""
        return [task for task in self.tasks if task.progress.state == "running"]

    def admitted(self) -> list[Task]:
        """Returns the tasks that are on the engine."""
        on_engine = set(self.engine.adapters)
        return [task for task in self.tasks if task.name in on_engine]

    def waiting(self) -> list[Task]:
        """Returns the tasks that would train if there were room."""
        return [task for task in self.running() if task.name not in self.admission.slots]

    def aside(self) -> list[Task]:
        """Returns the tasks that have begun and are not on the engine; a file holds the state of each."""
        on_engine = set(self.engine.adapters)
        return [task for task in self.alive() if task.progress.batches and task.name not in on_engine]

    def extendable(self) -> list[Task]:
        """Returns the tasks that have made all their steps and that a larger ``max_steps`` would continue."""
        trials = self.sweep is not None
        return [task for task in self.tasks if task.made_all_steps and not (trials and is_trial(task.name))]

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
        begun = set(self.engine.adapters)
        fits, fits_barely = self.memory.fits, self.memory.fits_barely
        found = [t for t in running if t.progress.batches or t.name in begun or fits(t.name)]
        if found:
            return found
        self.memory.look_again([task.name for task in self.admitted()])
        found = [t for t in running if fits(t.name)]
        found = found or [t for t in running if fits_barely(t.name)]
        if not found:
            self._none_fits(running)
        return found

    def _none_fits(self, tasks: Sequence[Task]) -> None:
        """Refuses tasks that fit in no process, and warns that a new process may train the rest."""
        assert self.memory is not None
        for task in tasks:
            self._passes(self._check, task)
        left = [task for task in tasks if task.name not in self.unfit]
        names = [task.name for task in left]
        if left and names != self._left:
            why = self.memory.no_room(names)
            self.reporter.warn(f"{some(names)}: {why}: mlora resume {self.folder.path}")
        self._left = names

    def needs(self, tasks: Sequence[Task]) -> list[MemoryNeed]:
        """Returns the scheduler's view of tasks."""
        adapters = self.memory.adapters if self.memory else None
        names = {task.name for task in tasks}
        return [memory_need(t, arrival, adapters) for arrival, t in enumerate(self.tasks) if t.name in names]

    def look_at(self, tasks: Sequence[Task], unfit: Mapping[str, str] | None) -> None:
        """Learns what new tasks need, and refuses those that never fit.

        `unfit` says which, and why, where a journaled decision is repeated.
        """
        if self.memory is None:
            return
        know = partial(know_task, self.memory.adapters)
        for task in [task for task in tasks if self._passes(know, task)]:
            if unfit is None:
                self._passes(self._check, task)
            elif task.name in unfit:
                self.unfits(task, unfit[task.name])

    def _check(self, task: Task) -> None:
        assert self.memory is not None
        self.memory.check(task.name)

    def _passes(self, check: Callable[[Task], None], task: Task) -> bool:
        """Refuses a task for which a check raises ValueError."""
        try:
            check(task)
        except ValueError as error:
            self.unfits(task, reason_of(error, f"adapter {task.name!r}"))
            return False
        return True

    def unfits(self, task: Task, message: str) -> None:
        """Refuses a task for which there is no room; it must not be on the engine."""
        self.unfit[task.name] = message
        self.refuse(task.name, self.unfit[task.name])

    def take(self, request: Request, unfit: Mapping[str, str] | None) -> None:
        """Carries out a user's request, as far as still possible; `unfit` is for `look_at`."""
        task = self.named(request.task)
        if request.kind == "submit":
            self._add(request.task, request.content, unfit)
        elif task is None or not task.alive:
            self.reporter.warn(f"{request.task}: {request.kind}: there is no such task in training")
        elif request.kind == "cancel":
            self._end(task, "cancelled", "")
        elif request.kind == "stop":
            self._stop(task)
        elif request.kind == "pause" and task.progress.state == "running":
            task.progress.state = "paused"
            self.reporter.changed(task)
        elif request.kind == "unpause" and task.progress.state == "paused":
            task.progress.state = "running"
            self.reporter.changed(task)

    def accept(self, proposal: Proposal, unfit: Mapping[str, str] | None) -> None:
        """Carries out a proposal of the sweep: prunes a trial or begins the next one; see `take`."""
        task = self.named(proposal.task)
        if proposal.trial is not None:
            self._add(proposal.task, proposal.trial, unfit)
        elif task is not None and task.alive:
            self._end(task, "pruned", "fell behind the other trials")

    def _add(self, name: str, content: Mapping[str, Any], unfit: Mapping[str, str] | None) -> None:
        """Adds a submitted task or a trial, or refuses it."""
        task, told = None, len(self._builder.warnings)
        if self.named(name) is not None or name in self.refused:
            self.reporter.warn(f"{name}: submitted again under a name that is taken; left out")
        else:
            try:
                adapter, datasets = submitted(name, content)
                if "trial" not in content:  # all trials have the loss that the sweep began with
                    check_loss(adapter.objective)
                task = self._builder.build(adapter, datasets)
            except RunError as error:
                if self.stopping():  # a signal to all processes of a job ends those that tokenise, too
                    if unfit is None:
                        raise Interrupted from error
                    raise  # the journal says that it was taken
                self.refuse(name, str(error))
        if self.sweep and "trial" in content:
            self.reporter.note(f"{name}: {self.sweep.begun(content['trial'], task)}")
        if task is None:
            return
        for line in self._builder.warnings[told:]:
            self.reporter.warn(line)
        self.tasks.append(task)
        self.look_at([task], unfit)
        if task in self.tasks:
            self.reporter.joined(task, self.tasks)

    def refuse(self, name: str, message: str) -> None:
        """Takes a task off the table that is not on the engine, and reports why."""
        self.tasks = [task for task in self.tasks if task.name != name]
        self.refused[name] = message
        if self.sweep:
            self.sweep.taken_off(name)
        self.reporter.fault(f"{name}: refused: {message}")

    def _stop(self, task: Task) -> None:
        """Ends a task as its user asked; one that has made no step has no adapter.

        `carry_out` saves the adapter, once the decision is journaled: a run that was killed in between stops
        the task at the same step again.
        """
        step = task.progress.step
        if not step:
            self._end(task, "cancelled", "stopped on request before its first step")
            return
        best = "" if task.saved_step == step else f"; saved as it was at step {task.saved_step}, the best"
        task.progress.state, task.progress.message = "finished", f"stopped on request at step {step}{best}"
        self._stopped.append(task)

    def _save_stopped(self) -> None:
        for task in self._stopped:
            if task.name not in self.engine.adapters:
                bring_back(self.engine, task, 0, self.folder.states)
            save_result(self.engine, task, self.folder)
            self.engine.remove_adapter(task.name)
            self.reporter.changed(task)
        self._stopped = []

    def _end(self, task: Task, state: State, message: str) -> None:
        if task.name in self.engine.adapters:
            self.engine.remove_adapter(task.name)
        task.progress.state, task.progress.message = state, message
        if self.sweep:
            self.sweep.taken_off(task.name, pruned=state == "pruned")
        self.reporter.changed(task)

    def carry_out(self, admission: Admission) -> list[Task]:
        """Saves stopped tasks, sets others aside, puts admitted ones on the engine; returns the new ones."""
        self._save_stopped()
        for task in self.admitted():
            if task.name not in admission.slots:
                set_aside(self.engine, task, self.folder.states)
        self.admission = admission
        on_engine = set(self.engine.adapters)
        new = [task for task in self.running() if task.name in admission.slots and task.name not in on_engine]
        self._tell_who_waits()
        return [task for task in new if self._put_on(task)]

    def _tell_who_waits(self) -> None:
        waiting = [task.name for task in self.waiting()]
        if waiting != self._waited:
            went_on = [name for name in self._waited if name in self.admission.slots]
            self._waited = waiting
            self.reporter.waits(waiting, went_on)

    def restore(self, admission: Admission, adapters: Mapping[str, Any]) -> None:
        """Puts admitted tasks back on the engine, with their states from a checkpoint."""
        self.admission = admission
        for task in self.alive():
            if task.name in admission.slots:
                if task.name not in adapters:
                    raise RunError(
                        f"{task.name}: cannot be restored: its checkpoint lacks adapters.{task.name}"
                    )
                restore_adapter(self.engine, task, admission.slots[task.name], adapters[task.name])
        if self.memory is not None:  # else those that are not admitted are about to be
            self._tell_who_waits()

    def _put_on(self, task: Task) -> bool:
        begins = not task.progress.batches
        try:
            bring_back(self.engine, task, self.admission.slots[task.name], self.folder.states)
        except ValueError as error:
            reason = reason_of(error, task.name, f"adapter {task.name!r}")
            if begins:
                self.refuse(task.name, reason)
            else:
                self._end(task, "stopped", reason)
            return False
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(f"{task.name}: out of memory for its weights; lower lora.r") from error
        if begins and task.lora:
            for line in lora_warnings(self.engine.registry, task.name, task.lora):
                self.reporter.warn(line)
        return True

    def next_batch(self, group: Group) -> list[Task]:
        """Returns the tasks for a group's next micro-batch; none of its batches may be under way."""
        running = group.running()
        if self.memory is None:
            return running
        lengths = {task.name: task.next_lengths() for task in running}
        bounds = self.memory.estimate.as_adopted.activations
        chosen = next_batch(lengths, self.admission.budget, bounds, list(self.admission.slots))
        return [task for task in running if task.name in chosen]

    def fits(self, lengths: Mapping[str, Sequence[int]]) -> bool:
        """Whether memory holds a micro-batch of admitted tasks with these sequence lengths."""
        if self.memory is None:
            return True
        bounds = self.memory.estimate.as_adopted.activations(lengths, list(self.admission.slots))
        return within(bounds, self.admission.budget)

    def worth_measuring(self, chosen: Sequence[Task]) -> bool:
        """Whether the memory of the next micro-batch of these tasks should be measured."""
        if self.memory is None:
            return False
        lengths = {task.name: task.next_lengths() for task in chosen}
        return self.memory.estimate.worth_measuring(lengths, list(self.admission.slots))

    def passed(self, measured: Sequence[MemorySample]) -> None:
        """Learns from a batch that has passed: measured micro-batches, memory kept and peak.

        Micro-batches under way may take their budgets. A task that goes on alone beyond the limit counts with
        its need where that is more.
        """
        if self.memory is None:
            return
        admission, here = self.admission, self.admitted()
        for one in measured:
            self.memory.estimate.observe(one.lengths, list(admission.slots), one.phases)
        sizes: Sequence[float] = admission.budget
        if len(admission.slots) == 1 and here:
            largest = {here[0].name: self.memory.adapters.largest(here[0].name)}
            needs = self.memory.estimate.as_adopted.activations(largest, list(largest))
            sizes = list(map(max, sizes, needs))
        held = self.memory.room().held
        foreseen = [size * min(most, admission.count) for size, most in zip(sizes, held, strict=True)]
        after = self.engine.memory_after if self.engine.idle else ()  # else stages hold other micro-batches
        self.memory.took([task.name for task in here], foreseen, self.engine.peak_memory, after)
