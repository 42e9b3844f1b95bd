"""The pipeline's simulator: timelines by hand, an oracle in steps, what always holds, and measures."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlora.pipeline.actions import Action, ActionType, Schedule, check_schedule
from mlora.pipeline.order import order_of
from mlora.simulate.measures import Window, bubble_ratio, busy_shares, measure, throughput
from mlora.simulate.simulator import simulate
from mlora.simulate.timeline import Event, Timeline, as_events
from mlora.simulate.workload import SimulatedLink, StageTime, Stream, Workload
from small_pipeline import by_order, run_slowly


def test_one_stage_is_never_idle() -> None:
    for schedule in ("lorapp", "gpipe", "1f1b"):
        numbers = measure(simulate(Workload([StageTime(1, 2)], [Stream(5, micro_batches=3)], schedule)))
        assert (numbers.bubble_ratio, numbers.makespan, numbers.in_flight) == (0, 45, [1])


def test_two_stages_by_hand() -> None:
    """D = L = 2, F = B = 1: from 3 on stage 0 alternates, from 1 on the last stage runs units."""
    timeline = simulate(Workload([StageTime(1, 1)] * 2, [Stream(2)] * 2))
    assert [(e.kind, e.stream, e.step, e.begin, e.end) for e in timeline.of_stage(0)] == [
        ("F", 0, 0, 0, 1),
        ("F", 1, 0, 1, 2),
        ("B", 0, 0, 3, 4),
        ("F", 0, 1, 4, 5),
        ("B", 1, 0, 5, 6),
        ("F", 1, 1, 6, 7),
        ("B", 0, 1, 7, 8),
        ("B", 1, 1, 9, 10),
    ]
    assert [(e.kind, e.stream, e.begin) for e in timeline.of_stage(1)] == [
        (kind, stream, float(2 * unit + offset))
        for unit, stream in zip((0.5, 1.5, 2.5, 3.5), (0, 1, 0, 1), strict=True)
        for offset, kind in enumerate("FB")
    ]
    numbers = measure(timeline)
    assert (numbers.makespan, numbers.in_flight) == (10, [2, 1])
    assert numbers.makespan_bubble_ratio == pytest.approx(1 - 16 / 20)
    assert numbers.window == (4, 8)
    assert numbers.bubble_ratio == 0
    assert numbers.throughput == pytest.approx(0.5)


def test_a_run_is_played_again_with_the_times_that_it_took() -> None:
    """One stream of two micro-batches on two stages, of which the second one is slow once."""
    slow = {(1, ActionType.FORWARD, 0, 0, 1): 5.0, (0, ActionType.BACKWARD, 0, 1, 0): 3.0}
    workload = Workload([StageTime(9, 9)] * 2, [Stream(2, 2)], "gpipe")
    timeline = simulate(workload, measured=lambda *key: slow.get(key, 1.0))
    begins = [
        [(event.kind, event.step, event.micro_batch, event.begin) for event in timeline.of_stage(stage)]
        for stage in range(2)
    ]
    first = [("F", 0, 0, 0), ("F", 0, 1, 1), ("B", 0, 0, 3), ("B", 0, 1, 9)]
    assert begins[0] == [*first, ("F", 1, 0, 10), ("F", 1, 1, 11), ("B", 1, 0, 13), ("B", 1, 1, 16)]
    assert begins[1][:4] == [("F", 0, 0, 1), ("B", 0, 0, 2), ("F", 0, 1, 3), ("B", 0, 1, 8)]
    assert [event.end for event in timeline.of_stage(0)][-2:] == [16, 17]


def test_links_by_hand() -> None:
    """Messages of 4 bytes at 2 bytes per second queue behind each other, and arrive 3 s after they left."""
    link = SimulatedLink(latency=3, bandwidth=2, row_bytes=2, overhead=0.5)
    timeline = simulate(
        Workload([StageTime(1, 1)] * 2, [Stream(1, rows=(2,))] * 2, forward=link, backward=link)
    )
    assert [e.begin for e in timeline.of_stage(1) if e.kind == "F"] == [6.5, 9]
    assert [e.begin for e in timeline.of_stage(0) if e.kind == "B"] == [14, 16.5]


def test_rows_and_optimizer_by_hand() -> None:
    stage = StageTime(forward=1, backward=2, forward_row=0.5, backward_row=1, optimizer=4)
    timeline = simulate(Workload([stage], [Stream(2, rows=(2, 4))]))
    events = [(e.kind, e.step, e.rows, e.begin, e.end) for e in timeline.of_stage(0)]
    assert events == [
        ("F", 0, 2, 0, 2),
        ("B", 0, 2, 2, 6),
        ("S", 0, 4, 6, 10),
        ("F", 1, 4, 10, 13),
        ("B", 1, 4, 13, 19),
    ]
    assert measure(timeline).makespan_throughput == pytest.approx(6 / 19)


def test_streams_join_late_and_end_early() -> None:
    streams = [Stream(10), Stream(2), Stream(3, start=7.0)]
    timeline = simulate(Workload([StageTime(1, 1)] * 2, streams))
    late = timeline.events[timeline.events["stream"] == 2]
    assert late["begin"].min() >= 7
    counts = Counter(e.stream for e in timeline.of_stage(0))
    assert counts == {0: 20, 1: 4, 2: 6}


def test_in_flight_is_limited_at_the_first_stage() -> None:
    stages = [StageTime(1, 1)] * 4
    for limit in (1, 2, 3, 5):
        limited = Workload(stages, [Stream(10)] * 8, in_flight=limit)
        assert max(measure(simulate(limited)).in_flight) == limit
    numbers = measure(simulate(Workload(stages, [Stream(10, rows=(3,))] * 8)))
    assert numbers.rows_in_flight == [3 * most for most in numbers.in_flight]
    assert numbers.in_flight[-1] == 1
    for schedule, expected in (("gpipe", [6, 6, 6, 1]), ("1f1b", [4, 3, 2, 1])):
        flushed = Workload(stages, [Stream(2, micro_batches=6)], schedule)
        assert measure(simulate(flushed)).in_flight == expected


def test_too_short_for_a_steady_window() -> None:
    numbers = measure(simulate(Workload([StageTime(1, 1)] * 4, [Stream(1)])))
    assert (numbers.window, numbers.bubble_ratio, numbers.throughput) == (None, None, None)
    assert numbers.makespan == 8


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Small workloads of whole seconds under any schedule."""
    depth = draw(st.integers(1, 4))
    seconds = st.integers(1, 3)
    stages = [StageTime(draw(seconds), draw(seconds)) for _ in range(depth)]
    schedule = draw(st.sampled_from(["lorapp", "gpipe", "1f1b"]))
    stream = st.builds(
        Stream,
        st.integers(1, 4),
        st.integers(1, 3),
        start=st.integers(0, 9) if schedule == "lorapp" else st.just(0),
    )
    streams = draw(st.lists(stream, min_size=1, max_size=4 if schedule == "lorapp" else 1))
    links = st.lists(st.builds(SimulatedLink, st.integers(0, 3)), min_size=depth - 1, max_size=depth - 1)
    limit = draw(st.none() | st.integers(1, 4))
    return Workload(stages, streams, schedule, draw(links), draw(links), limit)


def action_lists(timeline: Timeline) -> Schedule:
    """Returns a whole run's order of work as a fixed schedule of one round.

    All micro-batches of all streams and steps are numbered as they enter stage 0.
    """
    numbers: dict[tuple[int, int, int], int] = {}
    lists: list[list[Action]] = [[] for _ in range(timeline.stages)]
    for event in as_events(timeline.events[np.isin(timeline.events["kind"], list(ActionType))]):
        key = (event.stream, event.step, event.micro_batch)
        number = numbers.setdefault(key, len(numbers))
        lists[event.stage].append(Action(event.stage, ActionType(event.kind), number))
    return lists


@settings(max_examples=150, deadline=None)
@given(workloads())
def test_equal_to_the_oracle(workload: Workload) -> None:
    sizes = [stream.micro_batches for stream in workload.streams]
    depth = len(workload.stages)

    def rule(stage: int) -> object:
        return by_order(order_of(workload.schedule, stage, depth, workload.in_flight), sizes)

    expected = Timeline.of(run_slowly(workload, rule))
    assert np.array_equal(simulate(workload).events, expected.events)


@settings(max_examples=100, deadline=None)
@given(workloads(), st.randoms(use_true_random=False))
def test_what_always_holds(workload: Workload, random: object) -> None:
    rows = tuple(random.randint(1, 5) for _ in range(3))
    streams = [Stream(s.steps, s.micro_batches, rows, s.start) for s in workload.streams]
    stages = [StageTime(t.forward, t.backward, 0.1, 0.2, 0.3) for t in workload.stages]
    link = SimulatedLink(0.25, 4.0, 2.0, 0.125)
    timeline = simulate(Workload(stages, streams, workload.schedule, link, link, workload.in_flight))
    depth, events = len(stages), as_events(timeline.events)
    work = [e for e in events if e.kind != "S"]

    every = {(i, s, m) for i, t in enumerate(streams) for s in range(t.steps) for m in range(t.micro_batches)}
    assert Counter((e.stage, e.kind, *e[2:5]) for e in work) == Counter(
        (stage, kind, *key) for stage in range(depth) for kind in "FB" for key in every
    )
    for before, after in pairwise(events):
        assert before.stage != after.stage or after.begin >= before.end - 1e-9
    at = {(e.stage, e.kind, e[2:5]): e for e in work}
    for (stage, kind, key), event in at.items():
        source = stage - 1 if kind == "F" else stage + 1
        if 0 <= source < depth:
            sent = at[source, kind, key].end
            assert event.begin >= sent + link.seconds(event.rows) + link.latency - 1e-9
        if kind == "B":
            assert event.begin >= at[stage, "F", key].end - 1e-9
    for stream, step, micro_batch in every:
        if step:
            ends = [at[0, "B", (stream, step - 1, m)].end for m in range(streams[stream].micro_batches)]
            assert at[0, "F", (stream, step, micro_batch)].begin >= max(ends) - 1e-9
    orders = [
        [e[2:5] for e in work if (e.stage, e.kind) == (stage, kind)]
        for stage in range(depth)
        for kind in "FB"
    ]
    assert all(order == orders[0] for order in orders), "both directions are FIFOs"
    check_schedule(action_lists(timeline))


def test_a_simulated_run_is_a_static_schedule() -> None:
    """Its lists, run again as one round, give the same timeline."""
    link = SimulatedLink(0.25)
    workload = Workload([StageTime(1, 2)] * 4, [Stream(5, micro_batches=2)] * 3, forward=link, backward=link)
    timeline = simulate(workload)
    lists = action_lists(timeline)
    assert check_schedule(lists) == 30
    again = simulate(Workload(workload.stages, [Stream(1, 30)], lists, link, link))
    for column in ("stage", "kind", "begin", "end"):
        assert np.array_equal(again.events[column], timeline.events[column])
    slower = simulate(
        Workload([StageTime(1, 2)] * 4, [Stream(1, 30)], lists, SimulatedLink(1), SimulatedLink(1))
    )
    assert measure(slower).makespan > measure(timeline).makespan


def test_measured_events_are_a_timeline() -> None:
    events = [
        Event(1, "F", 0, 0, 0, 2.0, 3.0),
        Event(0, "F", 0, 0, 0, 1.0, 2.0),
        Event(1, "B", 0, 0, 0, 3.0, 4.0),
    ]
    timeline = Timeline.of([*events, Event(0, "B", 0, 0, 0, 4.0, 5.0)])
    assert timeline.stages == 2
    assert timeline.of_stage(1) == [events[0], events[2]]
    assert measure(timeline).makespan == 4
    assert measure(timeline).makespan_bubble_ratio == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: StageTime(-1, 1), "forward: expected a number of at least 0, got -1"),
        (lambda: SimulatedLink(bandwidth=0), "bandwidth: expected a number above 0, got 0"),
        (lambda: SimulatedLink(latency=float("inf")), "latency: expected a number of at least 0, got inf"),
        (lambda: Stream(0), "steps: expected a number of at least 1, got 0"),
        (lambda: Stream(1, rows=()), "rows: expected numbers of at least 1"),
        (lambda: Workload([], [Stream(1)]), "stages: expected at least one, got none"),
        (lambda: Workload([StageTime(1, 1)], [Stream(1)], "pipedream"), "schedule: expected one of lorapp"),
        (
            lambda: Workload([StageTime(1, 1)] * 3, [Stream(1)], forward=[SimulatedLink()]),
            "forward: expected one link, or 2 for 3 stages, got 1",
        ),
    ],
)
def test_refusals(make: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        make()


def test_an_order_that_waits_for_ever_is_named() -> None:
    class Idle:
        def next_action(self, forward: object, backward: object) -> None:
            return None

    with pytest.raises(ValueError, match="deadlock: stream 0 never finishes its step 0"):
        simulate(Workload([StageTime(1, 1)] * 2, [Stream(1)]), lambda _s, _d: Idle())


@pytest.mark.parametrize(("seconds", "rows"), [(1e6, 1), (1e300, 1), (1.0, 10**20)])
def test_what_does_not_fit_the_clock_is_refused(seconds: float, rows: int) -> None:
    with pytest.raises(
        ValueError, match="times or rows: too large; a simulated run may take at most 106 days"
    ):
        simulate(Workload([StageTime(seconds, 1)] * 2, [Stream(20, rows=(rows,))]))


@pytest.mark.nightly  # half a million actions; fewer are simulated in all other tests
def test_many_stages_and_streams() -> None:
    numbers = measure(simulate(Workload([StageTime(1, 1)] * 256, [Stream(2)] * 1000)))
    assert numbers.bubble_ratio == pytest.approx(0, abs=0.005)


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
