"""Decisions at iteration boundaries: requests are taken, trials begin, tasks are admitted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from mlora.cluster.signals import Interrupted
from mlora.config.run_config import RunConfig
from mlora.errors import RunError, reason_of
from mlora.memory.room import MemoryLimit, Room, sum_of
from mlora.planning.task_memory import know_task
from mlora.run.reporter import some
from mlora.run.status_publisher import StatusPublisher
from mlora.run.task_states import longer_files, state_file
from mlora.run.task_table import TaskEvent, TaskTable
from mlora.scheduler import ORDERS, PLACEMENTS, Admission, Bounds, admit
from mlora.store.checkpoint import FORMAT
from mlora.store.queue import Request, TaskQueue
from mlora.store.submission import submitted
from mlora.sweep.ranking import Proposal
from mlora.tasks.groups import slot_count
from mlora.tasks.task import Task, check_loss


class Decisions:
    """Takes requests of users and trials of the sweep, and decides which tasks are admitted.

    Decisions are made at iteration boundaries, where no batch is under way. The journal in the run's queue
    records each decision before it is carried out. A run that resumes from a checkpoint repeats the decisions
    that were journaled after it.

    The journal has one entry for each iteration, and a checkpoint holds the decisions up to its iteration. So
    a second decision at a boundary, or one right after a checkpoint, is recorded ``at_once``: under the next
    iteration, in which no task takes part.

    Attributes:
        taken: the number of the last request that was taken.
    """

    def __init__(self, config: RunConfig, table: TaskTable) -> None:
        self.taken = 0
        self._config, self._table, self._memory, self._sweep = config, table, table.memory, table.sweep
        self._placement, self._key = PLACEMENTS[config.scheduler.placement], journal_key(config)
        self._queue: TaskQueue | None = None
        self._publisher: StatusPublisher | None = None
        self._again: dict[int, Mapping[str, Any]] = {}  # entries to repeat
        self._decided = 0  # the last iteration that a checkpoint holds, or under which a decision is recorded
        self._asked = False
        self._beyond: set[str] = set()
        self._left: list[str] = []
        self._proposed: list[dict[str, Any]] = []
        self.stopping: Callable[[], bool] = lambda: False
        """Whether a signal asks the run to end: then the resume takes what is left to take."""

    def start(self, entry: Mapping[str, Any] | None = None) -> None:
        """Admits the first tasks, as the journaled decision `entry` says if there is one."""
        for event in chain(self._refusals(self._table.alive(), entry), self._admissions(entry)):
            self._table.apply(event)

    def _remember(self, state: Mapping[str, Any]) -> None:
        """Restores what was learned about memory, if the run has a limit and had one then."""
        if self._memory and state["memory"]:
            self._memory.load_state(state["memory"])

    def state(self, iteration: int) -> dict[str, Any]:
        """Returns the decisions' part of a checkpoint, as plain values; the journal holds later ones."""
        self._decided = max(self._decided, iteration)
        return {
            **self._values(self._table.admission),
            "memory": self._memory.state() if self._memory else None,
            "due": self._asked or self._stale() or self.unsettled(),
            "slots": slot_count(self._config),
            "kept": {task.name: state_file(task) for task in self._table.aside()},
            "longer": {task.name: longer_files(task) for task in self._table.extendable()},
            "sweep": self._sweep.state() if self._sweep else None,
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores decisions, memory, sweep and adapters from a checkpoint."""
        state = checkpoint["decisions"]
        self.taken = state["taken"]
        if self._memory:
            for task in self._table.alive():
                know_task(self._memory.adapters, task)
        self._remember(state)
        if self._sweep:
            self._sweep.load_state(state["sweep"], self._table.tasks)
        other = state["of"] != self._key
        admission = _admission_of(state["admission"])
        # if every task waited for memory, this process may have room
        waits = bool(self._table.running()) and not admission.slots
        self._asked = state["due"] or other or waits
        # slots may name tasks that ended: without a memory limit their end may need no decision
        here = {task.name for task in self._table.running()}
        slots = {name: slot for name, slot in admission.slots.items() if name in here}
        admission = replace(admission, slots=slots)
        if state["slots"] != slot_count(self._config):  # the pipeline has changed
            admitted = [task for task in self._table.running() if task.name in admission.slots]
            slots = self._placement(self._table.needs(admitted), slot_count(self._config), {})
            admission = replace(admission, slots=slots, count=len(set(slots.values())))
        if other:  # valid until the next decision, which is due at once
            admission = replace(admission, budget=self._budget(admission))
        self._table.restore(admission, checkpoint["adapters"])

    def begin(
        self, queue: TaskQueue, iteration: int, entries: Mapping[int, Mapping[str, Any]] | None = None
    ) -> None:
        """Starts to take requests and to journal decisions.

        `entries` were journaled after the checkpoint and are repeated; None journals the first admission.
        """
        if entries is None:
            queue.write_entry(iteration, self._entry(self._table.admission) | {"at_once": False})
        self._queue, self._again, self._decided = queue, dict(entries or {}), iteration
        queue.changed()
        self._asked |= bool(queue.requests(self.taken))
        self._publisher = StatusPublisher(queue, self._table)
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Publishes changes for `mlora status`, at most every few seconds unless `now`."""
        if self._publisher is not None:
            self._publisher.show(now=now)

    @property
    def stops(self) -> list[int]:
        """Iterations at which journaled decisions are repeated."""
        return list(self._again)

    def asked(self) -> bool:
        """Whether there may be something to decide; takes microseconds."""
        if self._queue is not None:
            self._asked |= self._queue.changed()
        self._asked |= self._stale()
        return self._wanted() and not self._again

    def _wanted(self) -> bool:
        return self._asked or (self._sweep is not None and self._sweep.due())

    def _stale(self) -> bool:
        return self._memory is not None and self._memory.estimate.stale

    def minds_ends(self) -> bool:
        """Whether the end of a task calls for a decision: its room may serve other tasks or trials."""
        more = self._sweep is not None and self._sweep.left > 0
        return self._memory is not None or more or bool(self._table.waiting())

    def trial_ended(self) -> bool:
        """Whether a trial of a sweep has ended since the last decision."""
        return self._sweep is not None and self._sweep.ended()

    def unsettled(self) -> bool:
        """Whether an admitted task does not train, so that others may take its room."""
        running = {task.name for task in self._table.running()}
        return self.minds_ends() and not running.issuperset(self._table.admission.slots)

    def due(self, iteration: int) -> int | None:
        """Returns the iteration to record a decision under at a boundary, or None if none is due.

        As long as journaled decisions are left to repeat, only these are due.
        """
        if self._again:
            following = self._again.get(iteration + 1)
            at_once = iteration not in self._again and following is not None and following["at_once"]
            return iteration + at_once if iteration in self._again or at_once else None
        return iteration + (iteration == self._decided) if self._wanted() or self.unsettled() else None

    def decide(self, iteration: int, *, at_once: bool = False) -> list[Task]:
        """Decides what happens at a boundary, or repeats what was journaled; returns the admitted new tasks.

        `iteration` comes from `due`; `at_once` says that it is one more than all groups have made. Each event
        is carried out before the next is decided; the journal has them before anybody is put on the engine.
        """
        assert self._queue is not None
        self._asked, self._decided, self._proposed = False, iteration, []
        again, before = self._again.pop(iteration, None), set(self._table.engine.adapters)
        for event in self._events(self._queue, again):
            if event.kind == "admitted" and again is None:
                entry = {**self._entry(event.admission), "proposals": self._proposed, "at_once": at_once}
                self._queue.write_entry(iteration, entry)
            self._table.apply(event)
        self.show()
        return [task for task in self._table.admitted() if task.name not in before]

    def _events(self, queue: TaskQueue, again: Mapping[str, Any] | None) -> Iterator[TaskEvent]:
        """Yields what happens: requests are taken, trials pruned and begun, tasks admitted.

        After a signal no more requests are taken: the resume takes them.
        """
        behind = self._sweep.judge() if self._sweep else []
        for request in queue.requests(self.taken):
            if self.stopping() if again is None else request.number > again["taken"]:
                self._asked = True
                break
            try:
                yield from self._asked_for(request, again)
            except Interrupted:
                self._asked = True
                break
            self.taken = request.number
        proposals: Iterable[Proposal] = ()
        if again is not None:
            proposals = [Proposal(**values) for values in again["proposals"]]
        elif self._sweep:
            proposals = self._sweep.proposals(behind)
        with suppress(Interrupted):
            for proposal in proposals:  # each may depend on the one before
                task = self._table.named(proposal.task)
                if proposal.trial is not None:
                    yield from self._arrival(proposal.task, proposal.trial, again)
                elif task is not None and task.alive:
                    yield TaskEvent("pruned", task.name, "fell behind the other trials")
                self._proposed.append(asdict(proposal))
        yield from self._admissions(again)

    def _asked_for(self, request: Request, again: Mapping[str, Any] | None) -> Iterator[TaskEvent]:
        """Yields what comes of a user's request, as far as it is still possible."""
        task = self._table.named(request.task)
        step = task.progress.step if task else 0
        if request.kind == "submit":
            yield from self._arrival(request.task, request.content, again)
        elif task is None or not task.alive:
            self._table.reporter.warn(f"{request.task}: {request.kind}: there is no such task in training")
        elif request.kind == "pause" and task.progress.state == "running":
            yield TaskEvent("paused", task.name)
        elif request.kind == "unpause" and task.progress.state == "paused":
            yield TaskEvent("running", task.name)
        elif request.kind == "stop" and step:
            best = "" if task.saved_step == step else f"; saved as it was at step {task.saved_step}, the best"
            yield TaskEvent("stop", task.name, f"stopped on request at step {step}{best}")
        elif request.kind in ("stop", "cancel"):  # one that has made no step has no adapter
            asked = "stopped on request before its first step" if request.kind == "stop" else ""
            yield TaskEvent("cancelled", task.name, asked)

    def _arrival(
        self, name: str, content: Mapping[str, Any], again: Mapping[str, Any] | None
    ) -> Iterator[TaskEvent]:
        """Reads the data of a submitted task or a trial, and yields whether it joins or is refused."""
        table, reporter = self._table, self._table.reporter
        task, told = None, len(table.builder.warnings)
        if table.named(name) is not None or name in table.refused:
            reporter.warn(f"{name}: submitted again under a name that is taken; left out")
        else:
            try:
                adapter, datasets = submitted(name, content)
                if "trial" not in content:  # all trials have the loss that the sweep began with
                    check_loss(adapter.objective)
                task = table.builder.build(adapter, datasets)
            except RunError as error:
                if self.stopping():  # a signal to all processes of a job ends those that tokenise, too
                    if again is None:
                        raise Interrupted from error
                    raise  # the journal says that it was taken
                yield TaskEvent("refused", name, str(error))
        if self._sweep and "trial" in content:
            reporter.note(f"{name}: {self._sweep.begun(content['trial'], task)}")
        if task is None:
            return
        for line in table.builder.warnings[told:]:
            reporter.warn(line)
        refusals = list(self._refusals([task], again))
        yield from refusals or [TaskEvent("joined", name, task=task)]

    def _refusals(self, tasks: Sequence[Task], again: Mapping[str, Any] | None) -> Iterator[TaskEvent]:
        """Learns what new tasks need, and yields the refusal of each that memory never holds."""
        if self._memory is None:
            return
        adapters, check = self._memory.adapters, self._memory.check
        faults = {task.name: _fault(task, know_task, adapters, task) for task in tasks}
        for task in tasks:
            fault = faults[task.name]
            if not fault:
                fault = _fault(task, check, task.name) if again is None else again["unfit"].get(task.name, "")
            if fault:
                yield TaskEvent("refused", task.name, fault, unfit=True)

    def _entry(self, admission: Admission) -> dict[str, Any]:
        """Returns the journal's entry of a decision."""
        return {**self._values(admission), "memory": self._memory.entry() if self._memory else None}

    def _values(self, admission: Admission) -> dict[str, Any]:
        return {
            "of": self._key,
            "taken": self.taken,
            "admission": asdict(admission),
            "unfit": self._table.unfit,
        }

    def _admissions(self, again: Mapping[str, Any] | None) -> Iterator[TaskEvent]:
        """Yields who is admitted, after the refusals of tasks that no process has room for."""
        running = self._table.running()
        if again is not None:
            for task in [task for task in running if task.name in again["unfit"]]:
                yield TaskEvent("refused", task.name, again["unfit"][task.name], unfit=True)
            self._remember(again)
            yield TaskEvent("admitted", admission=_admission_of(again["admission"]))
            return
        if self._memory:
            self._memory.estimate.adopt()
        fixed = self._table.admission.slots if self._table.engine.replicas > 1 else {}
        order = ORDERS[self._config.scheduler.policy]
        candidates = self._candidates(running)  # may find that the base takes less memory now
        if self._memory and running and not candidates:
            yield from self._none_fits(self._memory, running)
        needs = self._table.needs(candidates)
        room = self._memory.room() if self._memory else Room()
        bounds: Bounds = self._memory.estimate.activations if self._memory else lambda lengths, among: ()
        found = admit(needs, room, slot_count(self._config), order, self._placement, bounds, fixed)
        self._warn_beyond(found)
        yield TaskEvent("admitted", admission=found)

    def _candidates(self, running: list[Task]) -> list[Task]:
        """Returns the running tasks that fit alone or have begun; the other tasks wait.

        If there are none, the processes release unused memory. Then tasks that barely fit are tried, and one
        of them runs alone. A task that only this process has no room for waits for a new process.
        """
        if self._memory is None or not running:
            return running
        begun = set(self._table.engine.adapters)
        fits, fits_barely = self._memory.fits, self._memory.fits_barely
        found = [t for t in running if t.progress.batches or t.name in begun or fits(t.name)]
        if found:
            return found
        self._memory.look_again([task.name for task in self._table.admitted()])
        found = [t for t in running if fits(t.name)]
        return found or [t for t in running if fits_barely(t.name)]

    def _none_fits(self, memory: MemoryLimit, tasks: Sequence[Task]) -> Iterator[TaskEvent]:
        """Yields refusals of tasks that fit in no process; warns that a new process may train the rest."""
        left = []
        for task in tasks:
            if fault := _fault(task, memory.check, task.name):
                yield TaskEvent("refused", task.name, fault, unfit=True)
            else:
                left.append(task)
        names = [task.name for task in left]
        if left and names != self._left:
            why = memory.no_room(names)
            self._table.reporter.warn(f"{some(names)}: {why}: mlora resume {self._table.folder.path}")
        self._left = names

    def _warn_beyond(self, admission: Admission) -> None:
        """Warns of a task that has begun and goes on alone though it does not fit.

        Either the limit was lowered or the process takes more memory than before.
        """
        if self._memory is None:
            return
        for task in self._table.running():
            if [task.name] != list(admission.slots) or task.name in self._beyond:
                continue
            if not (self._memory.fits(task.name) or self._memory.fits_barely(task.name)):
                self._beyond.add(task.name)
                self._table.reporter.warn(
                    f"{task.name}: goes on beyond scheduler.memory_limit: {self._memory.refusal(task.name)}"
                )

    def _budget(self, admission: Admission) -> tuple[float, ...]:
        """Returns the bytes on each stage that a micro-batch of the admitted tasks may use.

        Has the estimate learn their mixture: until the next decision nothing else does.
        """
        if self._memory is None:
            return ()
        names, room = list(admission.slots), self._memory.room()
        for task in self._table.running():
            if task.name in names:
                self._memory.estimate.activations({task.name: task.usual_lengths}, names)
        states = [self._memory.adapters.admitted(name) for name in names]
        return room.budget(sum_of(states, len(room.held)), admission.count)


def _fault(task: Task, check: Callable[..., object], *args: Any) -> str:
    """Returns the text of the ValueError that a check of a task raises; empty if it raises none."""
    try:
        check(*args)
    except ValueError as error:
        return reason_of(error, f"adapter {task.name!r}")
    return ""


def _admission_of(values: Mapping[str, Any]) -> Admission:
    return Admission(dict(values["slots"]), values["count"], tuple(values["budget"]))


def journaled(queue: TaskQueue, config: RunConfig, after: int) -> dict[int, dict[str, Any]]:
    """Returns the entries after a checkpoint (-1 = none); forgets them if `journal_key` has changed."""
    entries = queue.entries(after)
    if all(entry["of"] == journal_key(config) for entry in entries.values()):
        return entries
    queue.forget_entries(after)
    return {}


def journal_key(config: RunConfig) -> str:
    """Returns a hash of all that decisions depend on, and of their format, except tasks that come later.

    Journaled decisions are repeated only if it is the same.
    """
    adapters = [(adapter.name, adapter.priority, adapter.max_steps) for adapter in config.adapters]
    sweep = config.sweep.model_dump(exclude={"places", "trials"}) if config.sweep else None
    facts = [
        FORMAT,
        config.pipeline.stages,
        slot_count(config),
        config.scheduler.model_dump(),
        adapters,
        sweep,
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]
