"""Who is admitted, and who takes part: priorities, no starvation, and never more than there is."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlora.memory.room import Room, within
from mlora.scheduler import ORDERS, PLACEMENTS, MemoryNeed, admit, next_batch


class PerRow:
    """So many bytes a row at each place, and a constant; more where tasks of both kinds are admitted."""

    def __init__(self, places: Sequence[tuple[int, int]], kinds: Mapping[str, str]) -> None:
        self.places, self.kinds = places, kinds

    def __call__(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        rows = sum(map(sum, lengths.values()))
        mixed = 1.5 if len({self.kinds[name] for name in among}) > 1 else 1.0
        return [base + mixed * per_row * rows for base, per_row in self.places]


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@st.composite
def needs(draw: st.DrawFn, places: int) -> list[MemoryNeed]:
    found = []
    for arrival in range(draw(st.integers(1, 12))):
        usual = tuple(draw(LENGTHS))
        largest = max(usual, tuple(draw(LENGTHS)), key=sum)
        states = tuple(draw(st.lists(st.integers(0, 200), min_size=places, max_size=places)))
        work = draw(st.integers(1, 1000))
        found.append(
            MemoryNeed(f"t{arrival}", draw(st.integers(-1, 2)), arrival, work, states, usual, largest)
        )
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[MemoryNeed], Room, int, PerRow]:
    places = draw(st.integers(1, 3))
    tasks = draw(needs(places))
    slots = draw(st.integers(1, 4))
    held = tuple(draw(st.lists(st.integers(1, slots), min_size=places, max_size=places)))
    free = tuple(draw(st.lists(st.integers(50, 3000), min_size=places, max_size=places)))
    sizes = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=places, max_size=places))
    kinds = {need.name: draw(st.sampled_from("ab")) for need in tasks}
    return tasks, Room(free, held), slots, PerRow(sizes, kinds)


def used(
    admitted: Sequence[MemoryNeed], slots: Mapping[str, int], room: Room, estimate: PerRow
) -> list[float]:
    """Bytes at each place: all states, and the largest usual micro-batches that it holds at once."""
    among = [need.name for need in admitted]
    found = []
    for place, held in enumerate(room.held):
        batches = [
            estimate({n.name: n.usual for n in admitted if slots[n.name] == slot}, among)[place]
            for slot in set(slots.values())
        ]
        states = sum(need.states[place] for need in admitted)
        found.append(states + sum(sorted(batches, reverse=True)[:held]))
    return found


def fits_alone(need: MemoryNeed, room: Room, estimate: PerRow) -> bool:
    return within(estimate({need.name: need.largest}, [need.name]), room.budget(need.states, 1))


@settings(max_examples=300, deadline=None)
@given(cases(), st.sampled_from(sorted(ORDERS)), st.sampled_from(sorted(PLACEMENTS)))
def test_who_is_admitted_fits_and_who_waits_does_not(
    case: tuple[list[MemoryNeed], Room, int, PerRow], order: str, placement: str
) -> None:
    tasks, room, slots, estimate = case
    found = admit(tasks, room, slots, ORDERS[order], PLACEMENTS[placement], estimate)
    assert found.count <= slots
    assert set(found.slots.values()) <= set(range(found.count))
    by_name = {need.name: need for need in tasks}
    admitted = [by_name[name] for name in found.slots]
    assert room.free is not None
    if len(admitted) == 1 and not fits_alone(admitted[0], room, estimate):
        return  # nobody does
    assert within(used(admitted, found.slots, room, estimate), room.free)
    ranked = sorted(tasks, key=ORDERS[order])
    assert [need.name for need in ranked if need.name in found.slots] == list(found.slots)
    for place, need in enumerate(ranked):
        if need.name in found.slots:
            continue
        # it fits not even beside those alone that stand before it, whoever comes after it
        before = [other for other in ranked[:place] if other.name in found.slots]
        alone = admit([*before, need], room, found.count, ORDERS[order], PLACEMENTS[placement], estimate)
        both = set(alone.slots) == {*(other.name for other in before), need.name}
        assert not both or alone.count < found.count or not fits_alone(need, room, estimate)


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_the_first_always_runs_and_nobody_stands_back_who_would_fit(
    case: tuple[list[MemoryNeed], Room, int, PerRow], data: st.DataObject
) -> None:
    tasks, room, slots, estimate = case
    found = admit(tasks, room, slots, ORDERS["fcfs"], PLACEMENTS["token_balanced"], estimate)
    among = list(found.slots)
    largest = {need.name: need.largest for need in tasks}
    if len(among) == 1 and not fits_alone(tasks[int(among[0][1:])], room, estimate):
        return  # nobody does
    for slot in range(found.count):
        lengths = {}
        for name in (
            name for name, other in found.slots.items() if other == slot
        ):  # any that are no larger than the largest
            cut = data.draw(st.integers(1, len(largest[name])))
            lengths[name] = largest[name][:cut]
        if not lengths:
            continue
        chosen = next_batch(lengths, found.budget, estimate, among)
        assert chosen[0] == next(iter(lengths))
        assert within(estimate({n: lengths[n] for n in chosen}, among), found.budget)
        for name in lengths:
            if name not in chosen:
                before = {other: lengths[other] for other in chosen if among.index(other) < among.index(name)}
                assert not within(estimate({**before, name: lengths[name]}, among), found.budget)


class Learning(PerRow):
    """Learns at the first large micro-batch that it is asked about: needs a little more from then on."""

    def __call__(self, lengths: Mapping[str, Sequence[int]], among: Sequence[str]) -> list[float]:
        if max(map(max, lengths.values())) > 50:
            self.places = [(0, 102)]
        return super().__call__(lengths, among)


def test_who_fits_stays_where_the_estimate_learns_while_it_is_asked() -> None:
    tasks = [MemoryNeed(name, 0, n, 1.0, (0,), (10,), (10,)) for n, name in enumerate("abcdefg")]
    tasks.append(MemoryNeed("h", 0, 7, 1.0, (0,), (10,), (60,)))
    for free in range(6200, 8400, 20):
        estimate = Learning([(0, 100)], dict.fromkeys("abcdefgh", "a"))
        found = admit(tasks, Room((free,)), 1, ORDERS["fcfs"], PLACEMENTS["in_order"], estimate)
        assert len(found.slots) == min(free // 1020, 8), free


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_priorities_and_no_starvation_over_random_arrivals(data: st.DataObject) -> None:
    """Tasks arrive and end at random: no lower priority runs where a higher one that fits waits, and within a
    priority nobody waits for ever."""
    waiting: list[MemoryNeed] = []
    room, arrivals, now = Room((data.draw(st.integers(150, 400)),)), 0, 0
    left: dict[str, int] = {}
    passed_over: dict[str, int] = {}
    while now < 40 or waiting:
        now += 1
        if now <= 40 and data.draw(st.booleans()):
            usual = (data.draw(st.integers(1, 100)),)
            name = f"t{arrivals}"
            waiting.append(MemoryNeed(name, data.draw(st.integers(0, 2)), arrivals, 1.0, (10,), usual, usual))
            left[name], passed_over[name] = data.draw(st.integers(1, 5)), 0
            arrivals += 1
        estimate = PerRow([(5, 1)], dict.fromkeys(left, "a"))
        found = admit(waiting, room, 1, ORDERS["fcfs"], PLACEMENTS["token_balanced"], estimate)
        assert room.free is not None
        assert bool(found.slots) == bool(waiting)  # the largest fits alone
        for need in waiting:
            if need.name in found.slots:
                continue
            ahead = [n for n in waiting if n.name in found.slots and _before(n, need)]
            size = 5 + sum(sum(n.usual) + 10 for n in ahead) + sum(need.usual) + 10
            assert size > room.free[0]
            later = [n for n in waiting if n.name in found.slots and n.priority == need.priority]
            passed_over[need.name] += all(n.arrival > need.arrival for n in later) and bool(later)
        for name in found.slots:
            left[name] -= 1
        waiting = [need for need in waiting if left[need.name]]
        assert now < 1000
    assert max(passed_over.values(), default=0) <= 5 * arrivals


def _before(one: MemoryNeed, other: MemoryNeed) -> bool:
    return (-one.priority, one.arrival) < (-other.priority, other.arrival)


def need(name: str, rows: int, *, priority: int = 0, arrival: int = 0, work: float = 1.0) -> MemoryNeed:
    return MemoryNeed(name, priority, arrival, work, (0,), (rows,), (rows,))


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    tasks = [need("low", 60, arrival=0), need("high", 60, priority=1, arrival=1)]
    found = admit(tasks, Room((100,)), 1, ORDERS["fcfs"], PLACEMENTS["in_order"], PerRow([(0, 1)], FRIENDS))
    assert list(found.slots) == ["high"]


def test_what_is_left_is_filled_by_who_comes_later() -> None:
    tasks = [need("first", 60), need("large", 70, arrival=1), need("small", 30, arrival=2)]
    found = admit(tasks, Room((100,)), 1, ORDERS["fcfs"], PLACEMENTS["in_order"], PerRow([(0, 1)], FRIENDS))
    assert list(found.slots) == ["first", "small"]


def test_the_shortest_comes_first_within_a_priority() -> None:
    tasks = [need("long", 60, work=9), need("short", 60, arrival=1, work=2)]
    estimate = PerRow([(0, 1)], FRIENDS)
    found = admit(tasks, Room((100,)), 1, ORDERS["shortest_first"], PLACEMENTS["in_order"], estimate)
    assert list(found.slots) == ["short"]


def test_a_task_that_needs_it_all_has_the_pipeline_for_itself() -> None:
    """Two slots would halve what each micro-batch may use."""
    tasks = [need("large", 80), need("small", 10, arrival=1)]
    estimate = PerRow([(0, 1)], FRIENDS)
    found = admit(tasks, Room((100,), (2,)), 2, ORDERS["fcfs"], PLACEMENTS["token_balanced"], estimate)
    assert found.slots == {"large": 0, "small": 0}
    assert found.budget == (100,)


def test_the_first_is_admitted_alone_where_nobody_fits() -> None:
    """Whoever never fits was refused; here only the estimate has grown."""
    tasks = [need("a", 101), need("b", 102, priority=1)]
    estimate = PerRow([(0, 1)], FRIENDS)
    found = admit(tasks, Room((100,)), 1, ORDERS["fcfs"], PLACEMENTS["in_order"], estimate)
    assert found.slots == {"b": 0}
    assert next_batch({"b": [102]}, found.budget, estimate, ["b"]) == ["b"]


def test_without_a_limit_all_are() -> None:
    tasks = [need(name, 10**9, arrival=arrival) for arrival, name in enumerate("abc")]
    found = admit(tasks, Room(), 2, ORDERS["fcfs"], PLACEMENTS["in_order"], PerRow([(0, 1)], FRIENDS))
    assert found.slots == {"a": 0, "b": 1, "c": 0}


@pytest.mark.parametrize("slots", [2, 3, 5])
def test_slots_have_about_equally_many_rows(slots: int) -> None:
    tasks = [need(f"t{i}", rows) for i, rows in enumerate([90, 10, 50, 40, 30, 70, 20, 60, 80, 100])]
    places = PLACEMENTS["token_balanced"](tasks, slots, {})
    rows = [sum(n.usual[0] for n in tasks if places[n.name] == slot) for slot in range(slots)]
    assert max(rows) <= 1.1 * sum(rows) / slots


@pytest.mark.parametrize("placement", sorted(PLACEMENTS))
def test_who_cannot_move_stays(placement: str) -> None:
    tasks = [need("a", 50), need("b", 10), need("c", 10)]
    places = PLACEMENTS[placement](tasks, 2, {"a": 1, "b": 1})
    assert (places["a"], places["b"]) == (1, 1)
    assert list(places) == ["a", "b", "c"]


FRIENDS = dict.fromkeys(["low", "high", "first", "large", "small", "long", "short", "a", "b", "c"], "a")
