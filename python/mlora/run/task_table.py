"""The table of a run's tasks, and the events that change it: who joins, waits, trains, and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlora.config.lora_fields import lora_warnings
from mlora.config.sweep_config import is_trial
from mlora.engine.engine import Engine
from mlora.errors import RunError, reason_of
from mlora.memory.estimate import MemorySample
from mlora.memory.room import MemoryLimit, within
from mlora.planning.task_memory import memory_need
from mlora.run.reporter import Reporter
from mlora.run.task_states import bring_back, keep_for_longer, restore_adapter, save_result, set_aside
from mlora.scheduler import NOBODY, Admission, MemoryNeed, next_batch
from mlora.store.run_folder import RunFolder
from mlora.tasks.groups import Group
from mlora.tasks.task import State, Task, TaskBuilder
from mlora_ext.out_of_memory import is_out_of_memory

if TYPE_CHECKING:
    from mlora.sweep.trials import Sweep


@dataclass(frozen=True)
class TaskEvent:
    """Something that happens to a task of a run.

    Attributes:
        kind: the task has ``joined`` the run or was ``refused``; or its new state, where ``stop`` finishes it
            as its user asked. ``admitted``: who is on the engine from now on.
        name: the task.
        message: why.
        task: that joined.
        unfit: it was refused because memory never holds it.
    """

    kind: Literal["joined", "refused", "admitted", "stop"] | State
    name: str = ""
    message: str = ""
    task: Task | None = None
    unfit: bool = False
    admission: Admission = NOBODY


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
        self.engine, self.builder, self.reporter, self.folder = engine, builder, reporter, folder
        self._waited: list[str] = []
        self._stopped: list[Task] = []  # on request; `_admit` saves them

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

    def needs(self, tasks: Sequence[Task]) -> list[MemoryNeed]:
        """Returns the scheduler's view of tasks."""
        adapters = self.memory.adapters if self.memory else None
        names = {task.name for task in tasks}
        return [memory_need(t, arrival, adapters) for arrival, t in enumerate(self.tasks) if t.name in names]

    def apply(self, event: TaskEvent) -> None:
        """Carries out an event: here a task of a run that trains comes, gets another state, or leaves.

        A live run applies what `Decisions` decides and what training brings, a resumed one what the journal
        holds.
        """
        if event.kind == "admitted":
            self._admit(event.admission)
        elif event.kind == "joined":
            assert event.task is not None
            self.tasks.append(event.task)
            self.reporter.joined(event.task, self.tasks)
        elif event.kind == "refused":
            self.refuse(event.name, event.message, unfit=event.unfit)
        else:
            task = self.named(event.name)
            assert task is not None
            self._change(task, event.kind, event.message)

    def refuse(self, name: str, message: str, *, unfit: bool = False) -> None:
        """Takes a task off the table that is not on the engine, and reports why."""
        self.tasks = [task for task in self.tasks if task.name != name]
        self.refused[name] = message
        if unfit:
            self.unfit[name] = message
        if self.sweep:
            self.sweep.taken_off(name)
        self.reporter.fault(f"{name}: refused: {message}")

    def _change(self, task: Task, state: State | Literal["stop"], message: str) -> None:
        """Gives a task another state; one that has ended leaves the engine.

        A task that its user stops is saved by `_admit`, once the decision is journaled: a run that was killed
        in between stops it at the same step again.
        """
        if state == "stop":
            task.progress.state, task.progress.message = "finished", message
            self._stopped.append(task)
            return
        if state in ("running", "paused"):
            task.progress.state = state
        else:
            self._end(task, state, message)
        self.reporter.changed(task)

    def _end(self, task: Task, state: State, message: str) -> None:
        """Ends a task; saves one that has finished, and one that has failed if it keeps its best weights."""
        here, failed = task.name in self.engine.adapters, state == "stopped"
        saves = here and (state == "finished" or (failed and task.kept_step is not None))
        if saves and failed:
            message += f"; saved as it was at step {task.kept_step}, the best"
        if saves:
            save_result(self.engine, task, self.folder, in_doubt=failed)
        if state == "finished":
            message = "; ".join(filter(None, (task.progress.message, message)))
        task.progress.state, task.progress.message = state, message
        if saves and any(task is one for one in self.extendable()):
            keep_for_longer(self.engine, task, self.folder)
        if here:
            self.engine.remove_adapter(task.name)
        if self.sweep and (state in ("cancelled", "pruned") or (failed and not here)):
            self.sweep.taken_off(task.name, pruned=state == "pruned")

    def _admit(self, admission: Admission) -> None:
        """Saves stopped tasks, sets others aside, and puts admitted ones on the engine."""
        for task in self._stopped:
            if task.name not in self.engine.adapters:
                bring_back(self.engine, task, 0, self.folder.states)
            save_result(self.engine, task, self.folder)
            self.engine.remove_adapter(task.name)
            self.reporter.changed(task)
        self._stopped = []
        for task in self.admitted():
            if task.name not in admission.slots:
                set_aside(self.engine, task, self.folder.states)
        self.admission = admission
        on_engine = set(self.engine.adapters)
        new = [task for task in self.running() if task.name in admission.slots and task.name not in on_engine]
        self._tell_who_waits()
        for task in new:
            self._put_on(task)

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
                restore_adapter(self.engine, task, admission.slots[task.name], adapters[task.name])
        if self.memory is not None:  # else those that are not admitted are about to be
            self._tell_who_waits()

    def _put_on(self, task: Task) -> None:
        begins = not task.progress.batches
        try:
            bring_back(self.engine, task, self.admission.slots[task.name], self.folder.states)
        except ValueError as error:
            reason = reason_of(error, task.name, f"adapter {task.name!r}")
            self.apply(TaskEvent("refused" if begins else "stopped", task.name, reason))
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(f"{task.name}: out of memory for its weights; lower lora.r") from error
        if begins and task.lora:
            for line in lora_warnings(self.engine.registry, task.name, task.lora):
                self.reporter.warn(line)

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
