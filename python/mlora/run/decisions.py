"""Decisions at iteration boundaries: requests are taken, trials begin, tasks are admitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mlora.config.run_config import RunConfig
from mlora.engine.engine import Engine
from mlora.queue.status_publisher import StatusPublisher
from mlora.queue.task_queue import TaskQueue
from mlora.run.journal import Journal, journal_key
from mlora.run.report import Reporter
from mlora.run.task_table import TaskTable
from mlora.scheduler import ORDERS, PLACEMENTS, Admission, Room, admit
from mlora.scheduler.memory_need import sum_of
from mlora.sweep.ranking import Proposal
from mlora.tasks.groups import slot_count
from mlora.tasks.task import Task

if TYPE_CHECKING:
    from mlora.sweep.trials import Sweep


class Decisions:
    """Takes requests of users and trials of the sweep, and decides which tasks are admitted.

    Decisions are made at iteration boundaries, where no batch is under way. The journal records each
    decision before it is carried out. A run that resumes from a checkpoint repeats the decisions that were
    journaled after it.

    Attributes:
        taken: the number of the last request that was taken.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        table: TaskTable,
        reporter: Reporter,
        sweep: Sweep | None = None,
    ) -> None:
        self.taken = 0
        self._config, self._engine, self._table, self._reporter = config, engine, table, reporter
        self._memory, self._sweep = table.memory, sweep
        self._placement = PLACEMENTS[config.scheduler.placement]
        self._journal: Journal | None = None
        self._publisher: StatusPublisher | None = None
        self._asked = False
        self._beyond: set[str] = set()

    def start(self, entry: Mapping[str, Any] | None = None) -> None:
        """Admits the first tasks, as the journaled decision `entry` says if there is one."""
        self._table.look_at(self._table.alive(), None if entry is None else entry["unfit"])
        if entry is not None:
            self._remember(entry)
        self._table.carry_out(self._admission() if entry is None else _admission_of(entry["admission"]))

    def _remember(self, state: Mapping[str, Any]) -> None:
        """Restores what was learned about memory, if the run has a limit and had one then."""
        if self._memory and state["memory"]:
            self._memory.load_state(state["memory"])

    def state(self, iteration: int) -> dict[str, Any]:
        """Returns the decisions' part of a checkpoint, as plain values, and tells the journal of it."""
        if self._journal is not None:
            self._journal.saved(iteration)
        return {
            **self._decided(self._table.admission),
            "memory": self._memory.state() if self._memory else None,
            "due": self._asked or self._stale(),
            "slots": slot_count(self._config),
            "kept": {task.name: task.kept for task in self._table.alive() if task.kept is not None},
            "sweep": self._sweep.state() if self._sweep else None,
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores decisions, memory, sweep and adapters from a checkpoint."""
        state = checkpoint["decisions"]
        self.taken = state["taken"]
        if self._memory:
            for task in self._table.alive():
                self._table.know(task)
        self._remember(state)
        if self._sweep:
            self._sweep.load_state(state["sweep"], self._table.tasks)
        other = state["of"] != journal_key(self._config)
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
            slots = self._placement.place(self._table.needs(admitted), slot_count(self._config), {})
            admission = replace(admission, slots=slots, count=len(set(slots.values())))
        if other:  # valid until the next decision, which is due at once
            admission = replace(admission, budget=self._budget(admission))
            self._sample(admission)
        self._table.restore(admission, state["kept"], checkpoint["adapters"])

    def begin(
        self, queue: TaskQueue, iteration: int, entries: Mapping[int, Mapping[str, Any]] | None = None
    ) -> None:
        """Starts to take requests and to journal decisions.

        `entries` were journaled after the checkpoint and are repeated; None journals the first admission.
        """
        if entries is None:
            queue.write_entry(iteration, self._entry(self._table.admission) | {"at_once": False})
        self._journal = Journal(queue, iteration, entries or {})
        self._asked |= bool(queue.requests(self.taken))
        limit = self._config.scheduler.limit_bytes
        self._publisher = StatusPublisher(queue, self._engine, self._memory, limit, self._reporter.warn)
        self.show(now=True)

    def show(self, *, now: bool = False) -> None:
        """Publishes changes for `mlora status`, at most every few seconds unless `now`."""
        if self._publisher is not None:
            self._publisher.show(self._table.alive(), self._table.admission, now=now)

    @property
    def stops(self) -> list[int]:
        """Iterations at which journaled decisions are repeated."""
        return self._journal.stops if self._journal else []

    def asked(self) -> bool:
        """Whether there may be something to decide; takes microseconds."""
        if self._journal is not None:
            self._asked |= self._journal.queue.changed()
        self._asked |= self._stale()
        return self._wanted() and not self.stops

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
        """Returns the iteration to record a decision under, or None if none is due; see `Journal`."""
        assert self._journal is not None
        return self._journal.due(iteration, wanted=self._wanted() or self.unsettled())

    def decide(self, iteration: int, *, at_once: bool = False) -> list[Task]:
        """Takes requests, decides which tasks are admitted, and returns those that are new on the engine.

        `iteration` comes from `due`; `at_once` says that it is one more than all groups have made.
        """
        assert self._journal is not None
        self._asked = False
        again = self._journal.take(iteration)
        unfit = again["unfit"] if again else None
        behind = self._sweep.judge() if self._sweep else []
        requests = self._journal.queue.requests(self.taken)
        for request in requests:
            if again is None or request.number <= again["taken"]:
                self.taken = request.number
                self._table.take(request, unfit)
        if again is None:
            proposals = self._proposals(behind)
            if self._memory:
                self._memory.estimate.adopt()
            admission = self._admission()
            entry = {**self._entry(admission), "proposals": [asdict(proposal) for proposal in proposals]}
            self._journal.write(iteration, entry, at_once=at_once)
        else:
            for proposal in again["proposals"]:
                self._table.accept(Proposal(**proposal), unfit)
            for task in [task for task in self._table.running() if task.name in again["unfit"]]:
                self._table.unfits(task, again["unfit"][task.name])
            self._remember(again)
            self._asked = any(request.number > self.taken for request in requests)
            admission = _admission_of(again["admission"])
        new = self._table.carry_out(admission)
        self.show()
        return new

    def _proposals(self, behind: list[str]) -> list[Proposal]:
        """Accepts the sweep's proposals one by one: each may depend on the one before."""
        proposals = []
        for proposal in self._sweep.proposals(behind) if self._sweep else ():
            self._table.accept(proposal, None)
            proposals.append(proposal)
        return proposals

    def _entry(self, admission: Admission) -> dict[str, Any]:
        """Returns the journal's entry of a decision."""
        return {**self._decided(admission), "memory": self._memory.entry() if self._memory else None}

    def _decided(self, admission: Admission) -> dict[str, Any]:
        return {
            "of": journal_key(self._config),
            "taken": self.taken,
            "admission": asdict(admission),
            "unfit": self._table.unfit,
        }

    def _admission(self) -> Admission:
        fixed = self._table.admission.slots if self._engine.replicas > 1 else {}
        order = ORDERS[self._config.scheduler.policy]
        slots = slot_count(self._config)
        room, estimate = (self._memory.room(), self._memory.estimate) if self._memory else (Room(), NO_LIMIT)
        needs = self._table.needs(self._table.candidates())
        found = admit(needs, room, slots, order, self._placement, estimate, fixed)
        self._warn_beyond(found)
        return found

    def _warn_beyond(self, admission: Admission) -> None:
        """Warns of a task that has begun and goes on alone though it does not fit.

        Either the limit was lowered or the process takes more memory than before.
        """
        for task in self._table.running() if len(admission.slots) == 1 else ():
            if task.name not in admission.slots or self._memory is None:
                continue
            one = self._table.candidate(task)
            if self._memory.fits(one) or self._memory.fits_barely(one):
                continue
            if task.name not in self._beyond:
                self._beyond.add(task.name)
                self._reporter.warn(
                    f"{task.name}: goes on beyond scheduler.memory_limit: {self._memory.refusal(one)}"
                )

    def _sample(self, admission: Admission) -> None:
        """Has the estimate learn the mixture of admitted tasks; until the next decision nothing else does."""
        if self._memory is None:
            return
        names = list(admission.slots)
        for task in [task for task in self._table.running() if task.name in names]:
            self._memory.estimate.activations({task.name: task.usual_lengths}, names)

    def _budget(self, admission: Admission) -> tuple[float, ...]:
        """Returns the bytes on each stage that a micro-batch of the admitted tasks may use."""
        if self._memory is None:
            return ()
        states = [self._memory.adapters.admitted(name) for name in admission.slots]
        room = self._memory.room()
        return room.budget(sum_of(states, len(room.held)), admission.count)


class _NoLimit:
    def activations(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> Sequence[float]:
        return (0.0,)


NO_LIMIT = _NoLimit()


def _admission_of(values: Mapping[str, Any]) -> Admission:
    return Admission(dict(values["slots"]), values["count"], tuple(values["budget"]))
