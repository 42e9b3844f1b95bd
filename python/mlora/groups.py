"""Groups of tasks: those of a group share each batch, and groups fill a pipeline.

Groups do not depend on each other, so each runs at its own pace: its next batch starts when its last one has
passed the pipeline. What each batch holds is a function of the group's own iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlora.config import RunConfig
from mlora.tasks import Task


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


def assign(tasks: Sequence[Task], count: int) -> dict[str, int]:
    """Spread tasks over groups so that batches are about equally long.

    The longest first, each to the group with the fewest tokens so far.

    Args:
        tasks: with their data.
        count: of groups, at most; none is empty.

    Returns:
        The group of each task by name, groups counted in the order of their first tasks.
    """
    tokens = {task.name: _tokens(task) for task in tasks}
    loads = [0.0] * min(count, len(tasks))
    found: dict[str, int] = {}
    for name in sorted(tokens, key=lambda name: -tokens[name]):
        lightest = loads.index(min(loads))
        loads[lightest] += tokens[name]
        found[name] = lightest
    order = {group: place for place, group in enumerate(dict.fromkeys(found[task.name] for task in tasks))}
    return {task.name: order[found[task.name]] for task in tasks}


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
    groups = min(group_count(config), len(config.adapters))
    return -(-groups // pipeline.replicas) * pipeline.micro_batches


def _tokens(task: Task) -> float:
    """Tokens of one of its batches, on average."""
    samples = task.data.samples
    total = sum(len(sample.input_ids) for sample in samples)
    return task.config.per_device_train_batch_size * total / max(len(samples), 1)


class Rounds:
    """Which group starts next, and when all of them stop for a checkpoint.

    A checkpoint holds all groups after the same number of iterations, so none starts beyond one that is due.
    Whether one is due is known in advance: it depends on steps, not on results.

    Args:
        tasks: of the run.
        places: the group of each task by name.
        iteration: that all of them have made.
    """

    def __init__(self, tasks: Sequence[Task], places: Mapping[str, int], iteration: int) -> None:
        members: dict[int, list[Task]] = {}
        for task in tasks:
            members.setdefault(places[task.name], []).append(task)
        self.groups = [Group(place, members[place], iteration) for place in sorted(members)]
        self._waiting = deque(group for group in self.groups if group.running())
        self._under_way = 0
        self._most = iteration
        self._saved = iteration

    def next(self, *, stopping: bool) -> Group | None:
        """The group that starts now, or none.

        Args:
            stopping: whether the run shall end as soon as all groups have made as many iterations.
        """
        if not self._waiting:
            return None
        group = self._furthest_behind()
        if stopping and group.iteration >= self._most:
            return None
        if group.iteration > self._saved and self._save_due(group.iteration):
            return None
        self._waiting.remove(group)
        group.batched = group.running()
        self._under_way += 1
        self._most = max(self._most, group.iteration + 1)
        return group

    def ended(self, group: Group) -> None:
        """A group's batch has passed, and its tasks have taken their results."""
        group.iteration += 1
        self._under_way -= 1
        if group.running():
            self._waiting.append(group)

    def checkpoint_due(self) -> int | None:
        """The iteration of a checkpoint that is due now, with nothing under way; none if there is none."""
        if self._under_way or not self._waiting:
            return None
        iteration = self._furthest_behind().iteration
        due = iteration > self._saved and self._save_due(iteration)
        return iteration if due else None

    def saved(self, iteration: int) -> None:
        """A checkpoint was written."""
        self._saved = iteration

    def _furthest_behind(self) -> Group:
        """Of groups that are alike the one that has waited longest; replicas may have other speeds."""
        return min(self._waiting, key=lambda group: group.iteration)

    def _save_due(self, iteration: int) -> bool:
        return any(
            _saves(task, iteration - group.iteration)
            for group in self.groups
            if iteration >= group.iteration
            for task in (group.batched if iteration == group.iteration else group.running())
        )


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
