"""What a report reads: curves that stay bounded, time along the lines, a window of a trace."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from mlora.errors import RunError
from mlora.report.charts import Series, chart, value_axis
from mlora.report.history import MOST, Curve, Point, read_history
from mlora.report.numbers import count, duration, loss, number, percent, size
from mlora.report.timeline import read_timeline, window_of
from mlora.store.samples import append_samples, cut_samples, read_samples, samples_size
from report_runs import step


def curve(*values: float) -> Curve:
    made = Curve()
    for x, y in enumerate(values, 1):
        made.add(x, y)
    return made


def test_a_short_curve_is_kept_as_it_is() -> None:
    found = curve(3.0, math.nan, 1.0).points()
    assert found == [Point(1, 1, 3.0, 3.0, 3.0), Point(1, 3, 1.0, 1.0, 1.0)]


def test_points_are_joined_in_pairs() -> None:
    found = curve(4.0, 2.0, 1.0, 5.0, 7.0).points(most=3)
    assert found == [Point(2, 1.5, 3.0, 2.0, 4.0), Point(2, 3.5, 3.0, 1.0, 5.0), Point(1, 5, 7.0, 7.0, 7.0)]
    assert curve(4.0, 2.0, 1.0, 5.0, 7.0).points(most=2)[0] == Point(4, 2.5, 3.0, 1.0, 5.0)


def test_a_long_curve_stays_bounded_and_keeps_its_mean_and_range() -> None:
    values = [math.sin(n / 50) + (n == 7777) for n in range(10_000)]
    found = curve(*values).points()
    assert MOST <= len(found) <= 2 * MOST
    assert sum(point.count for point in found) == 10_000
    assert sum(point.count * point.y for point in found) == pytest.approx(sum(values))
    assert max(point.high for point in found) == max(values)
    assert len({point.count for point in found[:-1]}) == 1
    assert [point.x for point in found] == sorted(point.x for point in found)


def test_time_runs_along_the_lines() -> None:
    history = read_history(
        [
            {"adapter": "a", "step": 0, "eval_loss": 3.0, "eval_tokens": 9},
            step("a", 1, 2.0, seconds=1.0, tokens=10),
            step("b", 1, 2.0, seconds=1.5, tokens=20),
            step("a", 2, 1.0, seconds=2.0, tokens=10),
            step("late", 1, 1.0, seconds=0.5, tokens=5),  # came later
            step("late", 2, 1.0, seconds=0.5, tokens=5, skipped=True, grad_norm=None),
        ]
    )
    assert [point.x for point in history.memory.points()] == [1.0, 1.5, 3.0, 3.0, 3.5]
    assert (history.seconds, history.steps) == (3.5, 5)
    found = history.adapters
    assert {name: each.tokens for name, each in found.items()} == {"a": 20, "b": 20, "late": 10}
    assert {name: each.seconds for name, each in found.items()} == {"a": 3.0, "b": 1.5, "late": 1.0}
    assert found["late"].skipped == 1
    curves = found["a"].curves
    assert [(point.x, point.y) for point in curves["loss"].points()] == [(1, 2.0), (2, 1.0)]
    assert curves.keys() == {"eval_loss", "loss", "learning_rate", "grad_norm"}


def spans(pid: int, *named: tuple[str, float, float]) -> list[dict[str, Any]]:
    """Events of one stage as a trace has them; times in microseconds."""
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": "receive"}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": 1, "args": {"name": "compute"}},
        {"name": "forward a", "ph": "X", "pid": pid, "tid": 0, "ts": 0.0, "dur": 9e9},
    ]
    return events + [
        {"name": name, "ph": "X", "pid": pid, "tid": 1, "ts": begin, "dur": length}
        for name, begin, length in named
    ]


def test_a_timeline_shows_what_stages_computed() -> None:
    first = spans(0, ("forward a", 1000, 2000), ("backward a", 5000, 4000), ("settle", 9500, 500))
    found = window_of(first + spans(1, ("forward a", 3000, 1000), ("backward a", 4000, 1000)))
    assert found is not None
    assert [(w.kind, w.stream, w.begin, w.end) for w in found.stages[0]] == [
        ("forward", "a", 0.0, 2.0),
        ("backward", "a", 4.0, 8.0),
    ]
    assert [(w.kind, w.begin, w.end) for w in found.stages[1]] == [("forward", 2, 3), ("backward", 3, 4)]
    assert (found.length, found.begin, found.whole) == (8.0, 1.0, 9.0)
    assert (found.busy(0), found.busy(1)) == (0.75, 0.25)


def test_a_timeline_of_a_long_trace_is_a_window_of_it(tmp_path: Path) -> None:
    events = spans(0, *((f"forward {n}", 10.0 * n, 5.0) for n in range(5000)))
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = read_timeline(tmp_path / "trace.json")
    assert found is not None
    assert (len(found.stages[0]), found.busy(0)) == (49, pytest.approx(0.5, abs=0.01))
    assert found.begin == pytest.approx(24.76)
    assert read_timeline(tmp_path / "nothing.json") is None
    assert window_of(spans(0)) is None
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(RunError, match=r"trace\.json: is not a trace: 'traceEvents'"):
        read_timeline(tmp_path / "trace.json")


def test_axes_have_round_ticks() -> None:
    assert value_axis(0.2, 1.9).ticks == pytest.approx([0, 0.5, 1, 1.5])
    assert value_axis(98.0, 101.0).ticks == pytest.approx([98, 99, 100, 101])
    assert value_axis(0.004, 9.0, logarithmic=True).ticks == pytest.approx([0.01, 0.1, 1, 10])
    assert value_axis(0.2, 3.0, logarithmic=True).ticks == pytest.approx([0.2, 0.5, 1, 2])
    assert value_axis(-1.0, -1.0).low < -1.0 < value_axis(-1.0, -1.0).high
    ticks = value_axis(0, 1.7 * 2**30, zero=True, unit=2**30).ticks
    assert ticks == [0, 2**29, 2**30, 3 * 2**29]


def test_a_chart_is_drawn_by_hand() -> None:
    points = [Point(1, x, y, y, y) for x, y in ((0, 0.0), (5, 1.0), (10, 0.5))]
    found = chart("Loss", [Series("training", "train", points)], number, zero=True)
    assert found is not None
    # from 0 to 1.04: the margin above is 4 per cent
    assert found.shapes == [("line train", "M0 1000L500 38L1000 519")]
    assert [(mark.text, round(mark.place)) for mark in found.rows] == [("0", 100), ("0.5", 52), ("1", 4)]
    assert [mark.text for mark in found.columns] == ["0", "step 10"]
    assert [(mark.text, mark.across) for mark in found.ends] == [("0.5", 100.0)]
    assert found.description == "Loss: training from 0 to 0.5"
    assert chart("Loss", [Series("training", "train", [])], number) is None


def test_labels_at_the_ends_of_curves_do_not_hide_each_other() -> None:
    each = [Series(name, "train", [Point(1, 1, 0.1, 0.1, 0.1)]) for name in "abc"]
    each.append(Series("high", "held", [Point(1, 1, 9.0, 9.0, 9.0)]))
    found = chart("Loss", each, number, height=100)
    assert found is not None
    places = [mark.place for mark in found.ends]
    assert [b - a >= 14.9 for a, b in pairwise(places)] == [True] * 3
    assert max(places) <= 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(0.03117), "0.0312"),
        (number(12345.6), "12,346"),
        (number(999.7), "1,000"),
        (number(None), "\N{EN DASH}"),
        (loss(0.1), "0.100"),
        (loss(0.00002), "2e-05"),
        (loss(999.7), "1,000"),
        (percent(0.963), "96.3%"),
        (percent(1.0), "100%"),
        (size(754 * 2**20), "754 MiB"),
        (size(1.5 * 2**30), "1.5 GiB"),
        (size(1010 * 2**20), "1,010 MiB"),
        (size(0), "0"),
        (duration(0.25), "0.25 s"),
        (duration(81.4), "1 min 21 s"),
        (duration(7500), "2 h 5 min"),
        (duration(90000), "1 d 1 h"),
        (count(999_499), "999,499"),
        (count(999_999), "1 M"),
        (count(999_900_000), "1 G"),
        (count(1_830_000), "1.83 M"),
    ],
)
def test_numbers_are_written_for_people(text: str, expected: str) -> None:
    assert text == expected


def test_samples_are_cut_to_what_a_checkpoint_has_seen(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    assert (samples_size(path), read_samples(path)) == (0, [])
    cut_samples(path, 100)  # a file that is gone is not made
    assert not path.exists()
    answer = {"prompt": "p", "expected": "e", "answer": "", "exact": False}
    one = {"adapter": "a", "step": 0, "samples": [answer]}
    append_samples(path, [one])
    seen = samples_size(path)
    append_samples(path, [{**one, "step": 5}, {**one, "step": 6}])
    assert [record["step"] for record in read_samples(path)] == [0, 5, 6]
    cut_samples(path, seen)
    assert read_samples(path) == [one]
    with open(path, "ab") as file:
        file.write(b'{"adapter": "b", "st')  # of a process that was killed
    assert read_samples(path) == [one]
    path.write_text('{"adapter": "a"}\n')
    with pytest.raises(RunError, match=r"samples\.jsonl:1: is not a line of samples: step"):
        read_samples(path)
