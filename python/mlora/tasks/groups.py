"""Groups of tasks: those of a group share each batch, and groups fill a pipeline.

Groups do not depend on each other, so each runs at its own pace: its next batch starts when its last one has
passed the pipeline. What each batch holds is a function of the group's own iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mlora.config.run_config import RunConfig
from mlora.tasks.task import Task


@dataclass(eq=False)
class Group:
    """Tasks that are batched together.

    Attributes:
        place: counts the groups of the run.
        tasks: all of them, also those that have ended.
        iteration: batches that have passed.
        batched: the tasks of the batch that has passed last, or is under way.
    """

    place: int
    tasks: Sequence[Task]
    iteration: int
    batched: Sequence[Task] = ()

    def running(self) -> list[Task]:
        """The tasks that still train."""
        return [task for task in self.tasks if task.progress.state == "running"]


def group_count(config: RunConfig) -> int:
    """Return into how many groups a run's tasks are spread, at most.

    With as many groups as stages there is no bubble where all take equally long; varying lengths and links
    need up to twice as many. Schedules with rounds have one. Groups go to the replicas in turn.

    Args:
        config: the run's.
    """
    pipeline = config.pipeline
    if pipeline.processes == 1 or pipeline.schedule != "lorapp":
        return pipeline.replicas
    return 2 * pipeline.processes


def most_under_way(config: RunConfig) -> int:
    """Return how many micro-batches a run has under way at once in a pipeline: those of all its groups.

    Each stage bounds its share of them by it, see `mlora.pipeline.order.in_flight_of`.

    Args:
        config: the run's.
    """
    pipeline = config.pipeline
    return -(-slot_count(config) // pipeline.replicas) * pipeline.micro_batches


def slot_count(config: RunConfig) -> int:
    """Return how many groups a run has at most: tasks that come later join those that its own tasks form.

    Args:
        config: the run's.
    """
    return min(group_count(config), config.at_once)


class Rounds:
    """Which group starts next, and at which iterations all of them stand still.

    At such a boundary a checkpoint is written, or tasks come and go. Checkpoints hold all groups after the
    same number of iterations, so none starts beyond one that is due. Whether one is due is known in advance:
    it depends on steps, not on results. So is where a task ends by its steps, if others wait for its place.
    Where a task ends before, other groups may be ahead: all stand still as soon as they have made as many.

    Args:
        members: the tasks of each group, by the group's place.
        iteration: that all of them have made.
        stops: iterations at which all stand still whatever else happens.

    Attributes:
        groups: those that there are now.
        wanted: whether all shall stand still as soon as they have made as many iterations.
        waiting: whether there is something to decide when a task ends.
    """

    def __init__(
        self, members: Mapping[int, Sequence[Task]], iteration: int, stops: Collection[int] = ()
    ) -> None:
        self.wanted = False
        self.waiting = False
        self._stops = stops
        self.regroup(members, iteration)

    def regroup(self, members: Mapping[int, Sequence[Task]], iteration: int) -> None:
        """Form the groups anew, at a boundary.

        Args:
            members: the tasks of each group, by the group's place.
            iteration: that all of them have made.
        """
        self.groups = [Group(place, members[place], iteration) for place in sorted(members)]
        self._waiting = deque(group for group in self.groups if group.running())
        self._under_way = 0
        self._most = self._settled = iteration
        self.wanted = False

    def next(self, *, stopping: bool) -> Group | None:
        """The group that starts now, or none.

        Args:
            stopping: whether the run shall end as soon as all groups have made as many iterations.
        """
        if not self._waiting:
            return None
        group = self._furthest_behind()
        if (stopping or self.wanted) and group.iteration >= self._most:
            return None
        if group.iteration > self._settled and self._due(group.iteration):
            return None
        self._waiting.remove(group)
        self._under_way += 1
        self._most = max(self._most, group.iteration + 1)
        return group

    def ended(self, group: Group) -> None:
        """A group's batch has passed, and its tasks have taken their results."""
        group.iteration += 1
        self._under_way -= 1
        self.wanted |= self.waiting and any(map(_ended_early, group.batched))
        if group.running():
            self._waiting.append(group)

    def boundary(self) -> int:
        """The iteration that all have made, when `next` has none and nothing is under way."""
        return self._furthest_behind().iteration if self._waiting else self._most

    def settled(self, iteration: int) -> None:
        """What was due at a boundary was done."""
        self._settled = iteration
        self.wanted = False

    def _furthest_behind(self) -> Group:
        """Of groups that are alike the one that has waited longest; replicas may have other speeds."""
        return min(self._waiting, key=lambda group: group.iteration)

    def _due(self, iteration: int) -> bool:
        if iteration in self._stops or self.save_due(iteration):
            return True
        return self.waiting and any(_ends(task, ahead) for task, ahead in self._ahead(iteration))

    def save_due(self, iteration: int) -> bool:
        """Say whether a task's last batch up to an iteration makes a step that asks for a checkpoint."""
        return iteration > self._settled and any(
            _saves(task, ahead) for task, ahead in self._ahead(iteration)
        )

    def _ahead(self, iteration: int) -> Iterator[tuple[Task, int]]:
        """Tasks, and how many batches from their last one they will be at an iteration."""
        for group in self.groups:
            if iteration >= group.iteration:
                ahead = iteration - group.iteration
                for task in group.running() if ahead else group.batched:
                    yield task, ahead


def _ends(task: Task, ahead: int) -> bool:
    """Whether a task makes its last step with its batch `ahead` from its last one."""
    progress = task.progress
    if ahead == 0:
        return progress.state != "running" and not _ended_early(task)
    step, batches = progress.step, progress.batches
    for _ in range(ahead):
        if step >= task.total_steps:
            return False  # it will have ended before
        step += task.plan.ends_step(batches)
        batches += 1
    return step >= task.total_steps


def _ended_early(task: Task) -> bool:
    """Whether a task has ended before its last step, which nobody could foresee."""
    return task.progress.state != "running" and task.progress.step < task.total_steps


def _saves(task: Task, ahead: int) -> bool:
    """Whether a task makes a step that asks for a checkpoint with its batch `ahead` from its last one.

    Args:
        task: one that was in its group's last batch, or, for batches to come, one that is running.
        ahead: 0 = that last batch.
    """
    progress, every = task.progress, task.every(task.config.save_steps)
    if progress.state == "stopped" or not every:
        return False
    step, batches = progress.step, progress.batches
    for _ in range(ahead):
        if step >= task.total_steps:
            return False  # it will have ended
        step += task.plan.ends_step(batches)
        batches += 1
    return batches > 0 and step % every == 0 and task.plan.ends_step(batches - 1)
