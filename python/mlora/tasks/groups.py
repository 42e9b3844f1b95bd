"""Groups of tasks: the tasks of a group share each batch, and several groups fill a pipeline.

Groups are independent, so each runs at its own pace: its next batch starts when its last one has passed the
pipeline. What a batch holds depends only on the group's own iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlora.config.run_config import RunConfig
from mlora.pipeline.order import held_at_once
from mlora.tasks.task import Task


@dataclass(eq=False)
class Group:
    """Tasks that are batched together.

    Attributes:
        place: the group's index in the run.
        tasks: all of them, including those that have ended.
        iteration: batches that have passed the pipeline.
        batched: the tasks of the batch that has passed last, or is under way.
        saves: whether the last batch before a resume made a step that asks for a checkpoint.
    """

    place: int
    tasks: Sequence[Task]
    iteration: int
    batched: Sequence[Task] = ()
    saves: bool = False

    def running(self) -> list[Task]:
        """Returns the tasks that still train."""
        return [task for task in self.tasks if task.progress.state == "running"]


def group_count(config: RunConfig) -> int:
    """Returns the largest number of groups over which a run spreads its tasks.

    With as many groups as stages there is no bubble if all take equally long; varying lengths and links need
    up to twice as many. Schedules with rounds have one group per replica. Groups go to the replicas in turn.
    """
    pipeline = config.pipeline
    if pipeline.processes == 1 or pipeline.schedule != "lorapp":
        return pipeline.replicas
    return 2 * pipeline.processes


def most_under_way(config: RunConfig) -> int:
    """Returns how many micro-batches a pipeline has under way at once at most: those of all its groups.

    Each stage derives the bound of its own share from it, see `mlora.pipeline.order.in_flight_of`.
    """
    pipeline = config.pipeline
    return -(-slot_count(config) // pipeline.replicas) * pipeline.micro_batches


def held_by(config: RunConfig) -> list[int]:
    """Returns how many micro-batches' activations each stage of a run holds at once."""
    pipeline = config.pipeline
    return held_at_once(pipeline.schedule, pipeline.stages, most_under_way(config))


def held_batches(config: RunConfig) -> list[int]:
    """Returns the same in whole batches, which micro-batches are pieces of."""
    return [-(-held // config.pipeline.micro_batches) for held in held_by(config)]


def slot_count(config: RunConfig) -> int:
    """Returns the largest number of groups of a run. Tasks that come later join the groups of its own."""
    return min(group_count(config), config.at_once)


class Rounds:
    """Which group starts next, and at which iterations all groups stop: the boundaries.

    At a boundary a checkpoint is written, or tasks come and go. So no group starts beyond a boundary that is
    due. Checkpoints are known in advance, because they depend on steps, not on results. So are the last steps
    of tasks, which are boundaries if their end calls for a decision. If a task ends earlier, other groups may
    be ahead: then all groups stop as soon as they have made equally many iterations.

    A signal waits for no boundary: the checkpoint holds how far each group has come, see `state`.

    Args:
        members: the tasks of each group, by the group's index.
        iteration: the iterations that all groups have made.
        stops: iterations at which all groups stop whatever else happens.

    Attributes:
        groups: the present groups.
        wanted: whether all groups shall stop as soon as they have made equally many iterations.
        waiting: whether the end of a task calls for a decision.
    """

    def __init__(
        self, members: Mapping[int, Sequence[Task]], iteration: int, stops: Collection[int] = ()
    ) -> None:
        self.wanted = False
        self.waiting = False
        self._stops = stops
        self.regroup(members, iteration)

    def regroup(self, members: Mapping[int, Sequence[Task]], iteration: int) -> None:
        """Forms new groups from `members` at a boundary, at which all have made `iteration` iterations."""
        self.groups = [Group(place, members[place], iteration) for place in sorted(members)]
        self._waiting = deque(group for group in self.groups if group.running())
        self._under_way = 0
        self._most = self._settled = iteration
        self.wanted = False

    def state(self) -> dict[str, Any]:
        """Returns what `go_on` needs, as plain values; no batch is under way."""
        return {
            "settled": self._settled,
            "groups": {
                group.place: {
                    "iteration": group.iteration,
                    "tasks": [task.name for task in group.tasks],
                    "saves": group.saves or any(_saves(task, 0) for task in group.batched),
                }
                for group in self.groups
            },
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Gives the groups of a resumed run their iterations, if `state` has the same tasks in each group."""
        found = state["groups"]
        if any(
            group.place not in found or task.name not in found[group.place]["tasks"]
            for group in self.groups
            for task in group.tasks
        ):
            return
        here = {group.place: group for group in self.groups}
        self.groups = [here.get(place) or Group(place, (), 0) for place in sorted(found)]
        for group in self.groups:
            group.iteration, group.saves = found[group.place]["iteration"], found[group.place]["saves"]
        self._settled = state["settled"]

    def next(self) -> Group | None:
        """Returns the group that starts now, or None."""
        if not self._waiting:
            return None
        group = self._furthest_behind()
        if self.wanted and group.iteration >= self._most:
            return None
        if group.iteration > self._settled and self._due(group.iteration):
            return None
        self._waiting.remove(group)
        self._under_way += 1
        self._most = max(self._most, group.iteration + 1)
        return group

    def ended(self, group: Group) -> None:
        """Notes that a group's batch has passed and its tasks have taken their results."""
        group.iteration += 1
        group.saves = False
        self._under_way -= 1
        self.wanted |= self.waiting and any(map(_ended_early, group.batched))
        if group.running():
            self._waiting.append(group)

    def boundary(self) -> int:
        """Returns the iteration that all groups have made, when `next` gives None and none is under way."""
        return self._furthest_behind().iteration if self._waiting else self._most

    def settled(self, iteration: int) -> None:
        """Notes that everything due at a boundary is done."""
        self._settled = iteration
        self.wanted = False

    def _furthest_behind(self) -> Group:
        """Returns the group with the fewest iterations (replicas differ in speed), or the longest waiting."""
        return min(self._waiting, key=lambda group: group.iteration)

    def _due(self, iteration: int) -> bool:
        if iteration in self._stops or self.save_due(iteration):
            return True
        return self.waiting and any(_ends(task, ahead) for task, ahead in self._ahead(iteration))

    def save_due(self, iteration: int) -> bool:
        """Whether a task's last batch up to an iteration makes a step that asks for a checkpoint."""
        return iteration > self._settled and (
            any(_saves(task, ahead) for task, ahead in self._ahead(iteration))
            or any(group.saves for group in self.groups if group.iteration == iteration)
        )

    def _ahead(self, iteration: int) -> Iterator[tuple[Task, int]]:
        """Yields tasks, and how many batches after their last one they will be at an iteration."""
        for group in self.groups:
            if iteration >= group.iteration:
                ahead = iteration - group.iteration
                for task in group.running() if ahead else group.batched:
                    yield task, ahead


def _ends(task: Task, ahead: int) -> bool:
    """Whether a task makes its last step with the batch `ahead` batches after its last one (0 = that one)."""
    if ahead == 0:
        return task.progress.state != "running" and not _ended_early(task)
    later = _later(task, ahead)
    return later is not None and later[0] >= task.total_steps


def _later(task: Task, ahead: int) -> tuple[int, int] | None:
    """Returns a task's step and batches after `ahead` more batches, or None if it ends before."""
    step, batches = task.progress.step, task.progress.batches
    for _ in range(ahead):
        if step >= task.total_steps:
            return None
        step += task.plan.ends_step(batches)
        batches += 1
    return step, batches


def _ended_early(task: Task) -> bool:
    """Whether a task has ended before its last step, which cannot be foreseen."""
    return task.progress.state != "running" and task.progress.step < task.total_steps


def _saves(task: Task, ahead: int) -> bool:
    """Whether a task makes a step that asks for a checkpoint with the batch `ahead` batches after its last.

    If `ahead` is 0, the task was in its group's last batch; else it is running.
    """
    every, later = task.every(task.config.save_steps), _later(task, ahead)
    if task.progress.state == "stopped" or not every or later is None:
        return False
    step, batches = later
    return batches > 0 and step % every == 0 and task.plan.ends_step(batches - 1)
