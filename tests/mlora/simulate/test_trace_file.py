"""What a trace is made into: tracks for Perfetto, a measured timeline, times that the simulator reads."""

import json
from pathlib import Path

import pytest
from mlora.config.config_file import load_config
from mlora.errors import RunError
from mlora.pipeline.trace import Entry
from mlora.run.run import train
from mlora.simulate.measures import measure
from mlora.simulate.stage_times import read_times
from mlora.simulate.trace_file import TraceFiles
from tiny_run import run_data, write_run

MS = 10**6


def two_stages() -> list[list[list[object]]]:
    """Two streams of two steps on two stages: 1 ms forward, 2 ms backward, 1 ms on the links."""
    first, last = [], []
    for number in range(1, 5):
        begin = 10 * number * MS
        first.append(["compute", "forward", number, begin, begin + MS])
        first.append(["send", "forward", number, begin + MS, begin + 2 * MS])
        last.append(["receive", "forward", number, begin + MS, begin + 2 * MS])
        last.append(["compute", "forward", number, begin + 2 * MS, begin + 3 * MS])
        last.append(["compute", "backward", number, begin + 3 * MS, begin + 5 * MS])
        first.append(["receive", "backward", number, begin + 6 * MS, begin + 6 * MS])
        first.append(["compute", "backward", number, begin + 6 * MS, begin + 8 * MS])
    first.append(["compute", "forward", 5, 60 * MS, 61 * MS])  # an evaluation
    last.append(["compute", "forward", 5, 62 * MS, 63 * MS])
    return [first, last]


ENTRIES = [Entry(n, "ab"[n % 2], 0, 32, True) for n in range(1, 5)] + [Entry(5, "a", 0, 8, False)]


def test_a_timeline_and_times_of_known_spans(tmp_path: Path) -> None:
    files = TraceFiles(two_stages(), ENTRIES)
    timeline = files.timeline()
    assert timeline is not None
    assert timeline.stages == 2
    kinds = timeline.events["kind"].tolist()
    assert [kinds.count(kind) for kind in "FBE"] == [2 * 4, 2 * 4, 2]
    assert sorted(set(timeline.events["stream"].tolist())) == [0, 1]
    assert sorted(set(timeline.events["step"].tolist())) == [0, 1]
    measures = measure(timeline)
    assert measures.makespan == pytest.approx(53e-3)
    assert measures.makespan_bubble_ratio == pytest.approx(1 - (4 * 6 + 2) / (2 * 53))  # evaluation is work
    line = files.write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"trace.json", "times.json"}
    assert line.startswith("bubble ")
    assert " 75.5% of the whole trace; " in line
    assert files.streams == ["b", "a"]
    times = read_times(tmp_path / "times.json")
    assert (times.rows, times.streams) == (32, 2)
    spent = [seconds for stage in times.stages for seconds in (stage.forward, stage.backward)]
    assert spent == pytest.approx([1e-3, 2e-3] * 2)
    assert [link.latency for link in (*times.forward, *times.backward)] == pytest.approx([1e-3, 1e-3])


def test_tracks_for_perfetto(tmp_path: Path) -> None:
    TraceFiles(two_stages(), ENTRIES).write(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(s, i): role for s in (0, 1) for i, role in enumerate(("receive", "compute", "send"))}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(map(len, two_stages()))
    backward = next(e for e in spans if (e["pid"], e["tid"], e["name"]) == (1, 1, "backward b"))
    assert (backward["ts"], backward["dur"]) == (3000.0, 2000.0)
    assert backward["args"] == {"micro_batch": 1, "rows": 32}


def test_nothing_traced_through_all_stages(tmp_path: Path) -> None:
    first, _ = two_stages()
    line = TraceFiles([first, []], ENTRIES).write(tmp_path)
    assert line == f"no micro-batch passed all stages; {tmp_path / 'trace.json'}"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_the_first_of_two_replicas_is_drawn() -> None:
    first, last = two_stages()
    entries = [entry._replace(replica=entry.number % 2) for entry in ENTRIES]
    timeline = TraceFiles([first, last, [], []], entries, replicas=2).timeline()
    assert timeline is not None
    assert (timeline.stages, len(timeline.events)) == (2, 2 * 4 + 2)


def test_a_run_writes_its_trace(tiny_base: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    config = load_config(path, ["pipeline.stages=2"])
    train(config, trace=True)
    run = tmp_path / "run"
    assert {"trace.json", "times.json"} <= {file.name for file in run.iterdir()}
    assert len(read_times(run / "times.json").stages) == 2
    with pytest.raises(RunError, match="is not empty"):
        train(config)
    train(config, overwrite=True)
    assert not (run / "trace.json").exists()
