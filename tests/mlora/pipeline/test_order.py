"""Actions, schedules and the choices of a stage, as data."""

import pytest
from mlora.pipeline.actions import (
    FLUSHED,
    SCHEDULES,
    Action,
    ActionType,
    Schedule,
    check_schedule,
    gpipe,
    one_forward_one_backward,
)
from mlora.pipeline.order import Alternating, Listed, RoundPosition, in_flight_of, order_of

F, B = ActionType.FORWARD, ActionType.BACKWARD
ANY = RoundPosition()


def lists(*stages: str) -> Schedule:
    return [[Action.parse(text) for text in stage.split()] for stage in stages]


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, actions)) for actions in schedule]


def test_actions_are_written_and_read() -> None:
    assert str(Action(2, F, 0)) == "2F0"
    for text in ("0F0", "12B345"):
        assert str(Action.parse(text)) == text
    for text in ("", "F0", "0X0", "0F", "0F0 ", "-1F0", "0f0"):
        with pytest.raises(ValueError, match=r"action: expected <stage><F or B><micro-batch> such as 2F0"):
            Action.parse(text)


def test_schedules_by_hand() -> None:
    assert texts(gpipe(3, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"]
    assert texts(one_forward_one_backward(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert texts(one_forward_one_backward(1, 2)) == texts(gpipe(1, 2)) == ["0F0 0B0 0F1 0B1"]


@pytest.mark.parametrize("name", FLUSHED)
def test_schedules_hold(name: str) -> None:
    for stages in range(1, 7):
        for micro_batches in range(1, 9):
            assert check_schedule(FLUSHED[name](stages, micro_batches)) == micro_batches


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        ([], "expected actions for at least one stage, got none"),
        ([[]], "expected actions for at least one stage, got none"),
        (lists("0F0 0B0", "0F0 1B0"), "stage 1 has the action 0F0 of another stage"),
        (lists("0F0 0F1 0B0 0B1", "1F0 1B0"), r"stage 1: expected F of micro-batches \[0, 1\], .* got \[0\]"),
        (lists("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"), r"stage 0: expected B of micro-batches \[0, 1\]"),
        (lists("0F0 0F0 0B0 0B0"), r"stage 0: expected F of micro-batches \[0, 0\], each once"),
        (lists("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), "the last stage runs each micro-batch as one unit"),
        (lists("0B0 0F0", "1F0 1B0"), "stage 0 waits for ever before 0B0"),
        (lists("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"), "stage 0 waits for ever before 0B0"),
    ],
)
def test_check_schedule_refuses(schedule: Schedule, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_schedule(schedule)


def test_alternating_takes_what_is_ready_and_turns() -> None:
    order = Alternating()
    assert [order.next_action(ANY, ANY) for _ in range(4)] == [F, B, F, B]
    assert order.next_action(None, None) is None
    assert [order.next_action(ANY, None) for _ in range(2)] == [F, F]
    assert order.next_action(ANY, ANY) is B
    assert order.next_action(None, ANY) is B
    assert order.next_action(ANY, ANY) is F


def test_alternating_within_a_limit() -> None:
    order = Alternating(in_flight=2)
    assert [order.next_action(ANY, None) for _ in range(3)] == [F, F, None]
    assert order.next_action(ANY, ANY) is B
    assert order.next_action(ANY, ANY) is F
    assert order.next_action(ANY, None) is None
    with pytest.raises(ValueError, match="in_flight: expected at least 1, got 0"):
        Alternating(in_flight=0)


@pytest.mark.parametrize(
    ("in_flight", "expected"),
    [(1, [1, 1, 1, 1]), (3, [3, 3, 2, 1]), (4, [4, 3, 2, 1]), (6, [6, 5, 3, 1]), (7, [7, 5, 3, 1])],
)
def test_in_flight_of_each_stage(in_flight: int, expected: list[int]) -> None:
    assert [in_flight_of(stage, 4, in_flight) for stage in range(4)] == expected
    for stage, most in enumerate(expected):
        order = order_of("lorapp", stage, 4, in_flight)
        assert [order.next_action(ANY, None) for _ in range(most + 1)] == [F] * most + [None]


def test_in_flight_of_refuses() -> None:
    assert in_flight_of(0, 1, 5) == 5
    with pytest.raises(ValueError, match="in_flight: expected at least 1, got 0"):
        in_flight_of(1, 4, 0)


def test_listed_waits_for_what_its_list_says() -> None:
    order = order_of("1f1b", 0, 2)
    first, second, third = (RoundPosition(index, 3) for index in range(3))
    assert order.next_action(None, None) is None
    assert order.next_action(first, None) is F
    assert order.next_action(second, None) is F
    assert order.next_action(third, None) is None
    assert order.next_action(third, first) is B
    assert order.next_action(third, second) is F
    assert [order.next_action(None, place) for place in (second, third)] == [B, B]
    assert order.next_action(RoundPosition(0, 1), None) is F, "the next round may have another size"
    assert order.next_action(RoundPosition(0, 1), RoundPosition(0, 1)) is B


def test_listed_takes_lists_of_one_size() -> None:
    order = order_of(gpipe(2, 2), 1, 2)
    with pytest.raises(ValueError, match="expected a round of 2 micro-batches, got 3"):
        order.next_action(RoundPosition(0, 3), None)
    with pytest.raises(ValueError, match="expected lists for 3 stages, got 2"):
        Listed(0, 3, gpipe(2, 2))


def test_order_of_knows_all_schedules() -> None:
    for name in SCHEDULES:
        assert order_of(name, 0, 2).next_action(ANY, None) is F
    with pytest.raises(ValueError, match="schedule: expected one of lorapp, 1f1b, gpipe, got 'pipedream'"):
        order_of("pipedream", 0, 2)
