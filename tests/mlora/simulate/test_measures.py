"""What a timeline amounts to, by hand."""

import pytest
from mlora.simulate.measures import Window, bubble_ratio, busy_shares, measure, throughput
from mlora.simulate.timeline import Event, Timeline


def by_hand() -> Timeline:
    """One stream of five steps on two stages: 1 s forward on each, 1 and 2 s backward, 1 s of nothing."""
    events = []
    for step in range(5):
        begin = 6.0 * step
        events += [
            Event(0, "F", 0, step, 0, begin, begin + 1, 10),
            Event(1, "F", 0, step, 0, begin + 1, begin + 2, 10),
            Event(1, "B", 0, step, 0, begin + 2, begin + 4, 10),
            Event(0, "B", 0, step, 0, begin + 4, begin + 5, 10),
        ]
    return Timeline.of(events)


def test_a_window_of_whole_rounds() -> None:
    found = measure(by_hand())
    assert found.window == Window(5.0, 29.0)
    assert found.rounds == 4
    assert found.throughput == pytest.approx(10 / 6)
    assert found.bubble_ratio == pytest.approx(1 - (2 + 3) / (2 * 6))


@pytest.mark.parametrize(
    ("window", "shares"),
    [
        (Window(5.0, 29.0), [2 / 6, 3 / 6]),
        (Window(2.5, 4.5), [0.25, 0.75]),  # both cut a backward
        (Window(5.0, 6.0), [0.0, 0.0]),
        (Window(2.0, 4.0), [0.0, 1.0]),
        (Window(3.0, 3.0), [1.0, 1.0]),  # of no time nothing is idle
    ],
)
def test_busy_shares_count_what_lies_in_the_window(window: Window, shares: list[float]) -> None:
    assert busy_shares(by_hand(), window) == pytest.approx(shares)
    assert bubble_ratio(by_hand(), window) == pytest.approx(1 - sum(shares) / 2)


def test_the_busiest_stages_share_is_the_throughput_over_what_it_allows() -> None:
    window = Window(5.0, 29.0)
    allowed = 10 / 3  # rows per second of the second stage, were it never to wait
    assert max(busy_shares(by_hand(), window)) == pytest.approx(throughput(by_hand(), window) / allowed)
