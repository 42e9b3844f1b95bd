"""Schedules of one round of micro-batches, as lists of actions.

Sources: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., PipeDream, 2019, with a flush after each round).
LoRAPP (mLoRA, section 4) has no fixed list: see `order`.
"""

from __future__ import annotations

from collections.abc import Callable

from .actions import Action, ActionType, Schedule

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
