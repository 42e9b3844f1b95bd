"""Schedules of one round of micro-batches, as data: for each stage a list of actions.

Sources: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., PipeDream, 2019, with a flush after each round).
LoRAPP (mLoRA, section 4) has no fixed list: see `order`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ActionType(StrEnum):
    """Forward or backward, in the letters of `torch.distributed.pipelining`."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's forward or backward of one micro-batch, written `2F0`.

    The last stage runs forward, loss and backward as one unit: in its list, the `F` and `B` of a micro-batch
    follow each other.
    """

    stage: int  # from 0
    kind: ActionType
    micro_batch: int  # its index within the round

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads an action from its notation; raises ValueError for other text."""
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ValueError(f"action: expected <stage><F or B><micro-batch> such as 2F0, got {text!r}")
        return cls(int(match[1]), ActionType(match[2]), int(match[3]))


Schedule = Sequence[Sequence[Action]]
"""The actions of each stage, in order, for one round of micro-batches."""


def check_schedule(schedule: Schedule) -> int:
    """Checks a schedule and returns its number of micro-batches.

    Every stage must run each micro-batch once forward and once backward, and no stage may wait for ever. Both
    directions are strict FIFOs, so all stages take micro-batches in one order, forward and backward alike.

    Raises:
        ValueError: names the stage and the action that is wrong.
    """
    if not schedule or not schedule[0]:
        raise ValueError("schedule: expected actions for at least one stage, got none")
    forwards = [action.micro_batch for action in schedule[0] if action.kind is ActionType.FORWARD]
    for stage, actions in enumerate(schedule):
        for action in actions:
            if action.stage != stage:
                raise ValueError(f"schedule: stage {stage} has the action {action} of another stage")
        for kind in ActionType:
            order = [action.micro_batch for action in actions if action.kind is kind]
            if order != forwards or len(set(order)) != len(order):
                raise ValueError(
                    f"schedule: stage {stage}: expected {kind} of micro-batches {forwards}, each once and in "
                    f"this order, got {order}"
                )
    last = [str(action) for action in schedule[-1]]
    units = [f"{len(schedule) - 1}{kind}{index}" for index in forwards for kind in ActionType]
    if last != units:
        raise ValueError(f"schedule: the last stage runs each micro-batch as one unit: expected {units}")
    _check_ends(schedule)
    return len(forwards)


def _check_ends(schedule: Schedule) -> None:
    """Runs the lists without times, to find a stage that waits for ever."""
    places = [0] * len(schedule)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(schedule):
            while places[stage] < len(actions) and _ready(actions[places[stage]], len(schedule), done):
                done.add(actions[places[stage]])
                places[stage] += 1
                moved = True
    for stage, actions in enumerate(schedule):
        if places[stage] < len(actions):
            raise ValueError(f"schedule: stage {stage} waits for ever before {actions[places[stage]]}")


def _ready(action: Action, stages: int, done: set[Action]) -> bool:
    before = action.stage - 1 if action.kind is ActionType.FORWARD else action.stage + 1
    own = (
        action.kind is ActionType.FORWARD
        or Action(action.stage, ActionType.FORWARD, action.micro_batch) in done
    )
    return own and (before in (-1, stages) or Action(before, action.kind, action.micro_batch) in done)


SCHEDULES = ("lorapp", "1f1b", "gpipe")


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Returns a list per stage: all forwards of a round, then all backwards; the last stage runs units."""
    return [_flushed(stage, stages, micro_batches, ahead=micro_batches) for stage in range(stages)]


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """Returns a list per stage. Stage s of D runs `D - 1 - s` forwards, then forward and backward in
    turns, then the remaining backwards."""
    return [_flushed(s, stages, micro_batches, ahead=stages - s) for s in range(stages)]


def _flushed(stage: int, stages: int, micro_batches: int, ahead: int) -> list[Action]:
    """Returns the list of a stage that has at most `ahead` micro-batches between forward and backward."""
    ahead = 1 if stage == stages - 1 else min(ahead, micro_batches)
    actions = [Action(stage, ActionType.FORWARD, index) for index in range(ahead)]
    for index in range(micro_batches):
        actions.append(Action(stage, ActionType.BACKWARD, index))
        if index + ahead < micro_batches:
            actions.append(Action(stage, ActionType.FORWARD, index + ahead))
    return actions


FLUSHED: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Schedules that end each round before the next begins, by name."""
