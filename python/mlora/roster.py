"""Which tasks a run has, and which of them are on its engine: who comes, waits, is set aside and goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mlora.board import Board
from mlora.config import RunConfig
from mlora.device import is_out_of_memory
from mlora.doubts import lora_doubts
from mlora.engine import Engine
from mlora.errors import RunError
from mlora.groups import slot_count
from mlora.journal import Journal, journal_key
from mlora.needs import need_of
from mlora.report import Reporter
from mlora.run_folder import RunFolder
from mlora.run_memory import RunMemory
from mlora.scheduler import NOBODY, ORDERS, PACKINGS, Admission, Need, Room, admit
from mlora.scheduler.need import sum_of
from mlora.set_aside import bring_back, restore_adapter, set_aside
from mlora.submission import submitted
from mlora.sweep.wish import Wish
from mlora.task_queue import Request, TaskQueue
from mlora.tasks import State, Task, TaskBuilder

if TYPE_CHECKING:
    from mlora.sweep.trials import Sweep


class Roster:
    """The tasks of a run.

    Decisions are made at iteration boundaries, where nothing is under way. Each is written into the queue's
    journal before it is carried out, and a run that goes on from a checkpoint makes those again that are
    journaled after it.

    Args:
        config: the run's.
        engine: without adapters.
        builder: reads the data of tasks that come.
        tasks: those of the config, and those that have come before the checkpoint.
        refused: why others were not taken, by name.
        reporter: told of what happens.
        memory: knows its limit; none = there is no limit.
        sweep: fills its places with tasks; none = there is none.

    Attributes:
        tasks: all but the refused.
        refused: why, by name.
        memory: the run's; none = there is no limit.
        admission: who is admitted, and to which group.
        taken: the number of the last request that was taken.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        builder: TaskBuilder,
        tasks: Sequence[Task],
        refused: Mapping[str, str],
        reporter: Reporter,
        memory: RunMemory | None = None,
        sweep: Sweep | None = None,
    ) -> None:
        self.tasks, self.refused = list(tasks), dict(refused)
        self.memory, self._sweep = memory, sweep
        self.admission: Admission = NOBODY
        self.taken = 0
        self._config, self._engine, self._builder, self._reporter = config, engine, builder, reporter
        self._folder = RunFolder(config.output_dir)
        self._packing = PACKINGS[config.scheduler.packing]
        self._journal: Journal | None = None
        self._board: Board | None = None
        self._unfit: dict[str, str] = {}
        self._asked = False

    def named(self, name: str) -> Task | None:
        """The task of a name, if there is one."""
        return next((task for task in self.tasks if task.name == name), None)

    def running(self) -> list[Task]:
        """The tasks that have not ended and are not paused, whether they are admitted or wait."""
        return [task for task in self.tasks if task.progress.state == "running"]

    def admitted(self) -> list[Task]:
        """The tasks that are on the engine."""
        on_engine = set(self._engine.adapters)
        return [task for task in self.tasks if task.name in on_engine]

    def waiting(self) -> list[Task]:
        """The tasks that would train if there were room."""
        return [task for task in self.running() if task.name not in self.admission.slots]

    def members(self) -> dict[int, list[Task]]:
        """The admitted tasks of each group that there are, by its place."""
        found: dict[int, list[Task]] = {}
        for name, slot in self.admission.slots.items():
            task = self.named(name)
            if task is not None and task.progress.state == "running":
                found.setdefault(slot, []).append(task)
        return found

    def alive(self) -> list[Task]:
        """The tasks that have not ended."""
        return [task for task in self.tasks if task.alive]

    def start(self, entry: Mapping[str, Any] | None = None) -> None:
        """Admit the first tasks.

        Args:
            entry: what was decided before; decided anew where it is none.

        Raises:
            RunError: memory ran out.
        """
        self._look_at(self.alive(), entry)
        if entry is not None:
            self._remember(entry)
        self._carry_out(self._admission() if entry is None else _admission_of(entry["admission"]))

    def _look_at(self, tasks: Sequence[Task], again: Mapping[str, Any] | None) -> None:
        """Learn what tasks need, and refuse those that never fit: those of a decision that is made again."""
        if self.memory is None:
            return
        known = [task for task in tasks if self._is_known(task)]
        for task in known:
            try:
                if again is None:
                    self.memory.check(task)
                elif task.name in again["unfit"]:
                    raise ValueError(again["unfit"][task.name])
            except ValueError as error:
                self._unfits(task, error)

    def _is_known(self, task: Task) -> bool:
        """Let memory know a task, and say whether its adapter can be put on the base."""
        assert self.memory is not None
        try:
            self.memory.tasks.know(task)
        except ValueError as error:
            self._unfits(task, error)
            return False
        return True

    def _unfits(self, task: Task, error: ValueError) -> None:
        self._unfit[task.name] = str(error).removeprefix(f"adapter {task.name!r}: ")
        self._refuse(task.name, self._unfit[task.name])

    def _remember(self, state: Mapping[str, Any]) -> None:
        """What was learned of the memory, if the run has had a limit."""
        if self.memory and state["memory"]:
            self.memory.load_state(state["memory"])

    def state(self, iteration: int) -> dict[str, Any]:
        """Return what a checkpoint holds of who is admitted, as plain values.

        Args:
            iteration: of the checkpoint.
        """
        if self._journal is not None:
            self._journal.saved(iteration)
        return {
            **self._decided(self.admission),
            "memory": self.memory.state() if self.memory else None,
            "due": self._asked or self._stale(),
            "slots": slot_count(self._config),
            "kept": {task.name: task.kept for task in self.alive() if task.kept is not None},
            "sweep": self._sweep.state() if self._sweep else None,
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint.

        Args:
            checkpoint: with ``roster``, which `state` gave, and the states of ``adapters``.

        Raises:
            RunError: a state cannot be restored.
        """
        state, adapters = checkpoint["roster"], checkpoint["adapters"]
        self.taken = state["taken"]
        for task in self.alive() if self.memory else ():
            self.memory.tasks.know(task)  # type: ignore[union-attr]
        self._remember(state)
        if self._sweep:
            self._sweep.load_state(state["sweep"], self.tasks)
        self._asked = state["due"] or state["of"] != journal_key(self._config)
        self.admission = _admission_of(state["admission"])
        if state["slots"] != slot_count(self._config):  # the pipeline is another one now
            admitted = [task for task in self.running() if task.name in self.admission.slots]
            slots = self._packing.place(self._needs(admitted), slot_count(self._config), {})
            self.admission = replace(self.admission, slots=slots, count=len(set(slots.values())))
        if state["of"] != journal_key(self._config):  # until there is a decision, which there is at once
            self.admission = replace(self.admission, budget=self._budget())
        for task in self.alive():
            task.kept = state["kept"].get(task.name)
            if task.name in self.admission.slots:
                if task.name not in adapters:
                    raise RunError(
                        f"{task.name}: cannot be restored: its checkpoint lacks adapters.{task.name}"
                    )
                restore_adapter(self._engine, task, self.admission.slots[task.name], adapters[task.name])

    # decisions

    def begin(
        self, queue: TaskQueue, iteration: int, entries: Mapping[int, Mapping[str, Any]] | None = None
    ) -> None:
        """Take requests from now on, and journal what is decided.

        Args:
            queue: the run's.
            iteration: that the run has made.
            entries: journaled after the checkpoint that the run goes on from, to be made again; none where
                it has just been decided who is first.

        Raises:
            RunError: the queue cannot be written.
        """
        if entries is None:
            queue.write_entry(iteration, self._entry(self.admission) | {"at_once": False})
        self._journal = Journal(queue, iteration, entries or {})
        self._asked |= bool(queue.requests(self.taken))
        limit = self._config.scheduler.limit_bytes
        self._board = Board(queue, self._engine, self.memory, limit, self._reporter)
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Publish for `mlora status` what has changed, at most every few seconds.

        Args:
            now: however little time has passed.
        """
        if self._board is not None:
            self._board.show(self.alive(), self.admission, now=now)

    @property
    def stops(self) -> list[int]:
        """Iterations at which decisions are to be made again."""
        return self._journal.stops if self._journal else []

    def asked(self) -> bool:
        """Say whether there may be something to decide; takes microseconds."""
        if self._journal is not None:
            self._asked |= self._journal.queue.changed()
        self._asked |= self._stale()
        return self._wanted() and not self.stops

    def _wanted(self) -> bool:
        return self._asked or (self._sweep is not None and self._sweep.due())

    def _stale(self) -> bool:
        return self.memory is not None and self.memory.estimate.stale

    def minds_ends(self) -> bool:
        """Say whether there is something to decide when a task ends: what it had serves others."""
        more = self._sweep is not None and self._sweep.left > 0
        return self.memory is not None or more or bool(self.waiting())

    def trial_ended(self) -> bool:
        """Say whether a trial of a sweep has ended since the last decision."""
        return self._sweep is not None and self._sweep.ended()

    def unsettled(self) -> bool:
        """Say whether somebody who was admitted does not train, which others may do instead."""
        running = {task.name for task in self.running()}
        return self.minds_ends() and not running.issuperset(self.admission.slots)

    def due(self, iteration: int) -> int | None:
        """Return as which iteration's a decision is to be made at a boundary, or none where none is due.

        See :class:`mlora.journal.Journal`.

        Args:
            iteration: that all groups have made.
        """
        assert self._journal is not None
        return self._journal.due(iteration, wanted=self._wanted() or self.unsettled())

    def decide(self, iteration: int, *, at_once: bool = False) -> list[Task]:
        """Take requests, and decide who is admitted.

        Args:
            iteration: that `due` has returned.
            at_once: whether it is one more than all groups have made.

        Returns:
            The tasks that are newly on the engine.

        Raises:
            RunError: a file cannot be written.
        """
        assert self._journal is not None
        self._asked = False
        again = self._journal.take(iteration)
        behind = self._sweep.judge() if self._sweep else []
        requests = self._journal.queue.requests(self.taken)
        for request in requests:
            if again is None or request.number <= again["taken"]:
                self._take(request, again)
        if again is None:
            wishes = self._wishes(behind)
            if self.memory:
                self.memory.estimate.adopt()
            admission = self._admission()
            entry = {**self._entry(admission), "wishes": [asdict(wish) for wish in wishes]}
            self._journal.write(iteration, entry, at_once=at_once)
        else:
            for wish in again["wishes"]:
                self._grant(Wish(**wish), again)
            for task in [task for task in self.running() if task.name in again["unfit"]]:
                self._unfits(task, ValueError(again["unfit"][task.name]))
            self._remember(again)
            self._asked = any(request.number > self.taken for request in requests)
            admission = _admission_of(again["admission"])
        new = self._carry_out(admission)
        self.show()
        return new

    def _wishes(self, behind: list[str]) -> list[Wish]:
        """Do what the sweep wishes, each before it says the next.

        Args:
            behind: trials that are to be pruned.
        """
        wishes = []
        for wish in self._sweep.wishes(behind) if self._sweep else ():
            self._grant(wish, None)
            wishes.append(wish)
        return wishes

    def _grant(self, wish: Wish, again: Mapping[str, Any] | None) -> None:
        """Do what the sweep wishes: prune a trial, or take the next one."""
        task = self.named(wish.task)
        if wish.trial is not None:
            self._add(wish.task, wish.trial, again)
        elif task is not None and task.alive:
            self._end(task, "pruned", "fell behind the other trials")

    def _entry(self, admission: Admission) -> dict[str, Any]:
        """What the journal holds of a decision."""
        return {**self._decided(admission), "memory": self.memory.entry() if self.memory else None}

    def _decided(self, admission: Admission) -> dict[str, Any]:
        return {
            "of": journal_key(self._config),
            "taken": self.taken,
            "admission": asdict(admission),
            "unfit": self._unfit,
        }

    def _admission(self) -> Admission:
        fixed = self.admission.slots if self._engine.replicas > 1 else {}
        order = ORDERS[self._config.scheduler.policy]
        slots = slot_count(self._config)
        room, estimate = (self.memory.room(), self.memory.estimate) if self.memory else (Room(), NO_LIMIT)
        return admit(self._needs(self._fitting()), room, slots, order, self._packing, estimate, fixed)

    def _fitting(self) -> list[Task]:
        """The running tasks that fit alone, or have begun. The others wait until more is known of what the
        process itself takes; where there is nobody to learn that from, they are refused."""
        running = self.running()
        if self.memory is None:
            return running
        begun = set(self._engine.adapters)
        found = [t for t in running if t.kept is not None or t.name in begun or self.memory.fits(t)]
        for task in [] if found else running:
            self._unfits(task, ValueError(self.memory.refusal(task)))
        return found

    def _budget(self) -> tuple[float, ...]:
        """What a micro-batch of the admitted may use."""
        if self.memory is None:
            return ()
        states = [self.memory.tasks.admitted(name) for name in self.admission.slots]
        room = self.memory.room()
        return room.budget(sum_of(states, len(room.held)), self.admission.count)

    def _needs(self, tasks: Sequence[Task]) -> list[Need]:
        """What tasks need, in the order in which they came."""
        arrivals = {task.name: number for number, task in enumerate(self.tasks)}
        if self.memory is None:
            return [need_of(task, arrivals[task.name]) for task in tasks]
        known = self.memory.tasks
        return [
            need_of(task, arrivals[task.name], known.admitted(task.name), known.largest(task))
            for task in tasks
        ]

    def _take(self, request: Request, again: Mapping[str, Any] | None) -> None:
        """Do what a user asked for, as far as it still can be done."""
        self.taken = request.number
        task = self.named(request.task)
        if request.kind == "submit":
            self._add(request.task, request.content, again)
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

    def _add(self, name: str, content: Mapping[str, Any], again: Mapping[str, Any] | None) -> None:
        """Take a task, or refuse it."""
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
        self._look_at([task], again)
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

    def _carry_out(self, admission: Admission) -> list[Task]:
        """Bring the engine's adapters in line with who is admitted."""
        for task in self.admitted():
            if task.name not in admission.slots:
                set_aside(self._engine, task, self._folder.states)
        self.admission = admission
        on_engine = set(self._engine.adapters)
        new = [task for task in self.running() if task.name in admission.slots and task.name not in on_engine]
        return [task for task in new if self._put_on(task)]

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
            for line in lora_doubts(self._engine.registry, task.name, task.lora):
                self._reporter.warn(line)
        return True


class _NoLimit:
    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> Sequence[float]:
        return (0.0,)


NO_LIMIT = _NoLimit()


def _admission_of(values: Mapping[str, Any]) -> Admission:
    return Admission(dict(values["slots"]), values["count"], tuple(values["budget"]))
