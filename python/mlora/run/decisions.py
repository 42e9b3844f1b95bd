"""Decisions at iteration boundaries: requests are taken, trials begin, tasks are admitted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from mlora.cluster.signals import Interrupted
from mlora.config.run_config import RunConfig
from mlora.memory.room import Room, sum_of
from mlora.planning.task_memory import know_task
from mlora.run.status_publisher import StatusPublisher
from mlora.run.task_states import longer_files, state_file
from mlora.run.task_table import TaskTable
from mlora.scheduler import ORDERS, PLACEMENTS, Admission, Bounds, admit
from mlora.store.checkpoint import FORMAT
from mlora.store.queue import TaskQueue
from mlora.sweep.ranking import Proposal
from mlora.tasks.groups import slot_count
from mlora.tasks.task import Task


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

    def start(self, entry: Mapping[str, Any] | None = None) -> None:
        """Admits the first tasks, as the journaled decision `entry` says if there is one."""
        self._table.look_at(self._table.alive(), entry["unfit"] if entry else None)
        self._table.carry_out(self._admission(entry))

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
        """Takes requests, decides which tasks are admitted, and returns those that are new on the engine.

        `iteration` comes from `due`; `at_once` says that it is one more than all groups have made.
        """
        assert self._queue is not None
        self._asked, self._decided = False, iteration
        again = self._again.pop(iteration, None)
        unfit = again["unfit"] if again else None
        behind = self._sweep.judge() if self._sweep else []
        for request in self._queue.requests(self.taken):
            if self._table.stopping() if again is None else request.number > again["taken"]:
                self._asked = True
                break
            try:
                self._table.take(request, unfit)
            except Interrupted:
                self._asked = True
                break
            self.taken = request.number
        proposals: Iterable[Proposal] = ()
        if again is not None:
            proposals = [Proposal(**values) for values in again["proposals"]]
        elif self._sweep:
            proposals = self._sweep.proposals(behind)
        proposed = []
        with suppress(Interrupted):
            for proposal in proposals:  # each may depend on the one before
                self._table.accept(proposal, unfit)
                proposed.append(asdict(proposal))
        admission = self._admission(again)
        if again is None:
            entry = {**self._entry(admission), "proposals": proposed, "at_once": at_once}
            self._queue.write_entry(iteration, entry)
        new = self._table.carry_out(admission)
        self.show()
        return new

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

    def _admission(self, again: Mapping[str, Any] | None) -> Admission:
        """Returns who is admitted, as the journaled decision `again` says if there is one."""
        if again is not None:
            for task in [task for task in self._table.running() if task.name in again["unfit"]]:
                self._table.unfits(task, again["unfit"][task.name])
            self._remember(again)
            return _admission_of(again["admission"])
        if self._memory:
            self._memory.estimate.adopt()
        fixed = self._table.admission.slots if self._table.engine.replicas > 1 else {}
        order = ORDERS[self._config.scheduler.policy]
        needs = self._table.needs(self._table.candidates())  # may find that the base takes less memory now
        room = self._memory.room() if self._memory else Room()
        bounds: Bounds = self._memory.estimate.activations if self._memory else lambda lengths, among: ()
        found = admit(needs, room, slot_count(self._config), order, self._placement, bounds, fixed)
        self._warn_beyond(found)
        return found

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
