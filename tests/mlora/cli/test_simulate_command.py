"""`mlora simulate`: what it prints, its picture, measured times, and its error lines."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from closed_forms import lorapp_bubble, slowest_stage_bubble
from command_line import Run, only_line
from matplotlib.image import imread
from mlora.errors import RunError
from mlora.simulate.closed_form import least_bubble
from mlora.simulate.forecast import GROUPS_OF_A_STAGE
from mlora.simulate.measures import Window
from mlora.simulate.plot_timeline import plot_timeline
from mlora.simulate.timeline import Event, Timeline
from mlora.tasks.groups import group_count, most_under_way


def output(run: Run, *arguments: object) -> dict[str, Any]:
    """What `--json` says."""
    result = run("simulate", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_it_prints_ratios_throughput_and_memory(run: Run) -> None:
    result = run("simulate", "--stages", 4, "--adapters", 3, "--backward", 3, "--rows", 100, "--steps", 100)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "lorapp: 4 stages, 3 groups of 1 micro-batch a step, 100 steps",
        "bubble ratio: 25.0% simulated, closed form 25.0%",
        "whole run: 1.608 s, bubble ratio 25.4%",
        "throughput: 187.5 micro-batches/s, 1.875e+04 rows/s",
        "stage  forward ms  backward ms  most in flight",
        "0      1           3            3",
        "1      1           3            3",
        "2      1           3            2",
        "3      1           3            1",
    ]


def test_flushed_schedules_are_one_stream(run: Run) -> None:
    for schedule in ("gpipe", "1f1b"):
        found = output(run, "--schedule", schedule, "--micro-batches", 5)
        assert len(found["streams"]) == 1
        assert found["bubble_ratio"] == pytest.approx(3 / 8)
        assert found["closed_form"] == pytest.approx(3 / 8)


def test_links_and_limits(run: Run) -> None:
    options = ("--stages", 4, "--adapters", 4, "--latency", 0.1)
    found = output(run, *options)
    assert found["bubble_ratio"] == pytest.approx(lorapp_bubble(4, 4, latency=0.05))
    assert found["in_flight"] == [4, 3, 2, 1]
    by_bytes = output(run, *options, "--bytes", 8192, "--bandwidth", 1)
    by_rows = output(run, *options, "--hidden", 64, "--rows", 64, "--bandwidth", 1)
    assert by_bytes["bubble_ratio"] == by_rows["bubble_ratio"] > found["bubble_ratio"]
    assert by_rows["throughput"] == pytest.approx(64 * by_bytes["throughput"])
    slow = output(run, "--adapters", 9, "--bytes", 1e6, "--bandwidth", 1)
    assert slow["throughput"] == pytest.approx(125, rel=0.01), "8 ms for each message"


def test_it_limits_what_is_in_flight_as_a_run_does(run: Run) -> None:
    options = ("--stages", 8, "--adapters", 8, "--backward", 1.15, "--latency", 0.1075)
    found = output(run, *options)
    assert found["in_flight_limit"] == 8
    assert found["bubble_ratio"] == pytest.approx(0.080, abs=0.001)
    assert output(run, *options, "--in-flight", 64)["bubble_ratio"] == pytest.approx(0.239, abs=0.001)
    for stages, micro_batches in ((2, 1), (4, 3)):
        pipeline = SimpleNamespace(
            processes=stages, replicas=1, schedule="lorapp", micro_batches=micro_batches
        )
        config: Any = SimpleNamespace(pipeline=pipeline, at_once=stages + 1)
        assert group_count(config) == GROUPS_OF_A_STAGE * stages
        given = ("--stages", stages, "--adapters", stages + 1, "--micro-batches", micro_batches)
        assert output(run, *given)["in_flight_limit"] == most_under_way(config)


def test_more_streams_than_a_run_makes_are_told_of(run: Run) -> None:
    line = (
        "mlora train would put 9 adapters into 8 groups that share batches; to forecast that, use "
        "--adapters 8 with the times of a group's batch"
    )
    assert line in run("simulate", "--stages", 4, "--adapters", 9).stdout.splitlines()
    for arguments in (["--adapters", 8], ["--stages", 1, "--adapters", 9], ["--schedule", "gpipe"]):
        assert "mlora train" not in run("simulate", *arguments).stdout


def test_a_bound_that_may_not_be_reached_is_called_one(run: Run) -> None:
    def said(*arguments: object) -> str:
        result = run("simulate", *arguments)
        return next(line for line in result.stdout.splitlines() if line.startswith("bubble ratio"))

    locked = ("--stages", 8, "--adapters", 11, "--latency", 0.5)
    assert said(*locked) == "bubble ratio: 13.6% simulated, lower bound 4.3%"
    assert output(run, *locked)["closed_form_is_exact"] is False
    alike = ("--stages", 8, "--adapters", 8, "--latency", 0.1)
    assert said(*alike) == "bubble ratio: 8.0% simulated, closed form 8.0%"
    assert output(run, *alike)["closed_form_is_exact"] is True
    flushed = ("--schedule", "1f1b", "--micro-batches", 8)
    assert said(*flushed) == "bubble ratio: 27.3% simulated, closed form 27.3%"
    assert "lower bound 32.8%" in said(*flushed, "--latency", 0.3)
    early = ("--forward", "1,2", "--backward", "1,2", "--adapters", 4, "--steps", 3, "--micro-batches", 3)
    assert said(*early) == (
        "bubble ratio: 24.5% simulated, lower bound 25.0% of an endless run; this run is too short to show "
        "it, raise --steps"
    )
    assert said("--steps", 1) == "bubble ratio: no steady window in 1 step, closed form 0.0%"


def test_unequal_stages(run: Run) -> None:
    found = output(run, "--forward", "1,2,1", "--backward", "1,2,1", "--adapters", 8, "--steps", 40)
    assert found["closed_form"] == pytest.approx(slowest_stage_bubble([2, 4, 2]))
    assert found["bubble_ratio"] == pytest.approx(found["closed_form"], abs=0.005)
    assert "lower bound 33.3%" in run("simulate", "--forward", "1,2,1", "--backward", "1,2,1").stdout


def test_the_lower_bound_is_the_closed_form_of_equal_stages() -> None:
    for adapters in range(1, 9):
        for size in (1, 3):
            found = least_bubble([2.0] * 6, [0.2] * 5, adapters, size)
            assert found == pytest.approx(lorapp_bubble(6, adapters, size, latency=0.05))
    assert least_bubble([1.0] * 4, [0.0] * 3, 8, in_flight=2) == pytest.approx(0.5)
    assert least_bubble([1.0] * 4, [0.0] * 3, 1, optimizer=[1.0] * 4) == pytest.approx(0.75)


def test_measured_times(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    link = {"latency": 1e-4, "bandwidth": 1e8, "message_bytes": 10_000, "overhead": 1e-5}
    stage = {"forward": 1e-3, "backward": 1.5e-3, "optimizer": 1e-4}
    data = {"rows": 10, "stages": [stage] * 3, "forward": [link] * 2, "backward": [link] * 2}
    path.write_text(json.dumps(data))
    found = output(run, "--times", path, "--adapters", 6)
    assert found["links"]["forward"][1] == {
        "latency": 1e-4,
        "bandwidth": 1e8,
        "row_bytes": 1000,
        "overhead": 1e-5,
    }
    assert found["throughput"] == pytest.approx(10 / 2.6e-3, rel=0.01)
    first = run("simulate", "--times", path).stdout.splitlines()[0]
    assert (
        "3 stages, 4 groups (the default, as times.json gives no number; change it with --adapters) of 1"
        in first
    )
    path.write_text(json.dumps(data | {"streams": 2}))
    first = run("simulate", "--times", path).stdout.splitlines()[0]
    assert "3 stages, 2 groups (from times.json; change it with --adapters) of 1 micro-batch" in first
    assert len(output(run, "--times", path)["streams"]) == 2
    assert "3 stages, 6 groups of 1" in run("simulate", "--times", path, "--adapters", 6).stdout
    assert "3 stages, 1 group of 1" in run("simulate", "--times", path, "--schedule", "gpipe").stdout
    assert "--latency: cannot be used with --times" in only_line(
        run("simulate", "--times", path, "--latency", 1)
    )
    assert "was measured with 10 rows, got 3" in only_line(run("simulate", "--times", path, "--rows", 3))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "valid dictionary"),
        ("{}", "stages: is missing"),
        ('{"stages": []}', "stages: List should have at least 1 item"),
        ('{"stages": [{"forward": -1, "backward": 1}]}', "stages.0.forward: Input should be greater"),
        ('{"stages": [{"forward": NaN, "backward": 1}]}', "stages.0.forward: Input should be a finite"),
        ('{"stages": [{"forward": 1, "backward": 1}], "x": 1}', "x: Extra inputs are not permitted"),
        (
            '{"stages": [{"forward": 1, "backward": 1}], "forward": [{}]}',
            "forward: expected 0 links for 1 stages, got 1",
        ),
    ],
)
def test_faults_of_measured_times(run: Run, tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    line = only_line(run("simulate", "--times", path))
    assert line.startswith(f"error: {path}: ")
    assert fault in line


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--schedule", "pipedream"], "schedule: expected one of lorapp, 1f1b, gpipe, got 'pipedream'"),
        (["--forward", "a"], "--forward: expected milliseconds such as 1.5 or 1,2,2,1, got 'a'"),
        (["--forward", "1,"], "--forward: expected milliseconds"),
        (["--backward=-1"], "--backward: expected a number of at least 0, got -1.0"),
        (["--forward", "1,nan"], "--forward: expected a number of at least 0, got nan"),
        (["--forward", "1e9"], "times or rows: too large; a simulated run may take at most 106 days"),
        (["--forward", "1,2", "--stages", "3"], "--forward: expected 1 value or 3 for 3 stages, got 2"),
        (["--latency=-1"], "--latency: expected a number of at least 0, got -1.0"),
        (["--bandwidth", "0", "--bytes", "1"], "--bandwidth: expected a number above 0, got 0.0"),
        (["--bandwidth", "1"], "--bandwidth: needs --bytes, or --hidden and --rows"),
        (
            ["--bytes", "1", "--hidden", "2", "--bandwidth", "1"],
            "--bytes: cannot be used with --hidden",
        ),
        (["--bytes", "nan", "--bandwidth", "1"], "--bytes: expected a number of at least 0, got nan"),
        (["--bytes", "1"], "--bytes: needs --bandwidth"),
        (["--hidden", "1"], "--hidden: needs --bandwidth"),
        (["--itemsize", "4"], "--itemsize: needs --hidden"),
        (
            ["--schedule", "1f1b", "--in-flight", "1"],
            "--in-flight: needs --schedule lorapp; 1f1b sets its own",
        ),
        (
            ["--schedule", "gpipe", "--in-flight", "9"],
            "--in-flight: needs --schedule lorapp; gpipe sets its own",
        ),
        (["--times", "/no/such"], "/no/such: cannot be read: No such file or directory"),
        (["--out", "a.jpg"], "--out: expected the name of a .png file, got 'a.jpg'"),
        (["--out", "/no/such/a.png"], "/no/such/a.png: cannot be saved: No such file or directory"),
    ],
)
def test_faults_of_the_options(run: Run, arguments: list[str], fault: str) -> None:
    assert fault in only_line(run("simulate", *arguments))


@pytest.mark.parametrize("arguments", [[], ["--schedule", "1f1b"], ["--stages", 30, "--adapters", 40]])
def test_the_picture(run: Run, tmp_path: Path, arguments: list[object]) -> None:
    path = tmp_path / "timeline.png"
    assert run("simulate", *arguments, "--out", path).exit_code == 0
    picture = imread(path)
    assert picture.std() > 0.05
    assert picture.shape[1] == 1690


def test_a_measured_timeline_is_drawn(tmp_path: Path) -> None:
    timeline = Timeline.of([Event(0, "F", 3, 0, 0, 100.0, 100.5), Event(0, "S", 3, 0, 0, 100.5, 100.6)])
    plot_timeline(tmp_path / "a.png", timeline, "measured")
    plot_timeline(tmp_path / "b.png", timeline, "measured", window=Window(100.0, 100.2), until=100.3)
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
    with pytest.raises(RunError, match="cannot be saved"):
        plot_timeline(tmp_path / "no" / "a.png", timeline, "measured")


def test_it_needs_no_torch() -> None:
    code = "import sys, mlora.cli.app as cli; "
    code += "cli.app(sys.argv[1:], standalone_mode=0); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "simulate"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("False\n")
