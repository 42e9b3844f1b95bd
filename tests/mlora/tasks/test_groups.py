"""Groups of a run start, and stop for checkpoints, whatever their speeds."""

from types import SimpleNamespace
from typing import Any

import pytest
from mlora.tasks.groups import Group, Rounds


def task(name: str, steps: int, save_steps: int | None) -> Any:
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(save_steps=save_steps),
        plan=SimpleNamespace(ends_step=lambda index: True),
        total_steps=steps,
        progress=SimpleNamespace(state="running", step=0, batches=0),
        every=lambda interval: interval,
    )


def rounds_of(tasks: list[Any], places: list[int]) -> Rounds:
    members: dict[int, list[Any]] = {}
    for one, place in zip(tasks, places, strict=True):
        members.setdefault(place, []).append(one)
    return Rounds(members, 0)


def passed(rounds: Rounds, group: Group) -> None:
    for member in group.running():
        member.progress.step += 1
        member.progress.batches += 1
        if member.progress.step == member.total_steps:
            member.progress.state = "finished"
    rounds.ended(group)


def checkpoints(
    tasks: list[Any], ends: list[int], places: list[int] | None = None
) -> list[tuple[int, list[int]]]:
    """Run each task in its group; `ends` says, again and again, which group of those under way ends next."""
    rounds = rounds_of(tasks, places or list(range(len(tasks))))
    under_way: list[Group] = []
    found, turn = [], 0
    while True:
        while (group := rounds.next()) is not None:
            group.batched = group.running()
            under_way.append(group)
        if under_way:
            place = ends[turn % len(ends)]
            turn += 1
            group = next((group for group in under_way if group.place == place), under_way[0])
            under_way.remove(group)
            passed(rounds, group)
        elif any(group.running() for group in rounds.groups):
            iteration = rounds.boundary()
            assert rounds.save_due(iteration)
            found.append((iteration, [group.iteration for group in rounds.groups]))
            rounds.settled(iteration)
        else:
            assert all(one.progress.state == "finished" for one in tasks)
            return found


@pytest.mark.parametrize("ends", [[0, 1], [0, 0, 0, 1], [1, 1, 0], [0]])
def test_checkpoints_hold_all_groups_after_as_many_iterations(ends: list[int]) -> None:
    found = checkpoints([task("often", 20, None), task("saved", 20, 5)], ends)
    assert found == [(5, [5, 5]), (10, [10, 10]), (15, [15, 15])]


@pytest.mark.parametrize("ends", [[0, 1], [0, 0, 0, 1], [1]])
def test_a_group_that_has_ended_holds_nobody_back(ends: list[int]) -> None:
    found = checkpoints([task("short", 3, 2), task("long", 9, 4)], ends)
    assert found == [(2, [2, 2]), (4, [3, 4]), (8, [3, 8])]


@pytest.mark.parametrize("every", [2, 4])
def test_a_task_that_has_ended_in_a_group_that_goes_on_asks_no_more(every: int) -> None:
    found = checkpoints([task("short", 4, every), task("long", 12, None)], [0], [0, 0])
    assert [iteration for iteration, _ in found] == list(range(every, 5, every))


def test_steps_that_will_not_be_made_ask_for_nothing() -> None:
    """While the first group lags behind, nobody waits for the save of a step beyond its last one."""
    rounds = rounds_of([task("short", 3, 4), task("long", 9, None)], [0, 1])
    first, second = rounds.next(), rounds.next()
    assert first is not None
    assert second is not None
    for _ in range(6):
        passed(rounds, second)
        assert rounds.next() is second


def test_ended_tasks_of_a_resumed_run_have_no_plan() -> None:
    ended, running = task("ended", 4, 2), task("running", 9, 3)
    ended.progress = SimpleNamespace(state="finished", step=4, batches=4)
    ended.plan.ends_step = None
    running.progress.step = running.progress.batches = 5
    rounds = Rounds({0: [ended, running]}, 5)
    group = rounds.next()
    assert group is not None
    group.batched = group.running()
    passed(rounds, group)
    assert rounds.save_due(rounds.boundary())
    assert rounds.boundary() == 6
