"""What a run shows: lines, the live table, the table at the end, the picture."""

import io
import re
import struct
from pathlib import Path

import pytest
from mlora.commands.result_table import aligned, result_table
from mlora.config_file import resolve_config
from mlora.fields.base_info import BaseInfo
from mlora.plot import plot_losses, smooth
from mlora.report import LiveTable, Pace, PlainLines, clock
from mlora.run import train
from mlora.tasks import TaskBuilder
from rich.console import Console
from tiny_run import run_data


def test_live_table_has_a_row_for_each_adapter(tiny_base: Path, tmp_path: Path) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, highlight=False)
    data = run_data(tiny_base, tmp_path)
    data["defaults"]["max_length"] = 8
    train(resolve_config(data, folder=tmp_path), reporter=LiveTable(console))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    last = text[text.rindex("tokens/s") :]
    assert re.search(r"first +│ finished +│ +6/6 │ \d\.\d{4} │ +\d\.\d{4} │", last)
    assert re.search(r"second +│ finished +│ +9/9 ", last)
    assert "warning: dataset 'two': " in text


def test_plain_lines_come_every_logging_steps(tiny_base: Path, tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    config = resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path)
    train(config, reporter=PlainLines(out, err))
    lines = out.getvalue().splitlines()
    shown = [line.split()[2] for line in lines if line.startswith("second: step")]
    assert shown == ["2/9", "4/9", "6/9", "8/9"]
    assert [line.split()[2] for line in lines if "eval_loss" in line] == ["0/6", "3/6", "6/6"]
    assert err.getvalue() == ""


def test_who_waits_is_shown(tiny_base: Path, tmp_path: Path) -> None:
    out, drawn = io.StringIO(), io.StringIO()
    lines = PlainLines(out)
    for names, went_on in (
        (["b", "c"], []),
        (["a", "c"], ["b"]),
        (["c"], []),
        ([*"cdefghijk"], []),
        ([], ["c"]),
    ):
        lines.waits(names, went_on)  # `a` was refused, as all but `c` are in the end
    assert out.getvalue().splitlines() == [
        "waiting for memory: b, c now; 2 in all",
        "waiting for memory: a now, b no longer; 2 in all",
        "waiting for memory: d, e, f, g, h, i and 2 more now; 9 in all",
        "waiting for memory: c no longer; 0 in all",
    ]
    table = LiveTable(Console(file=drawn, force_terminal=True, width=100, highlight=False))
    config = resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path)
    builder = TaskBuilder(config, BaseInfo(config.base_model, config.base_folder))
    table.start([builder.build(adapter) for adapter in config.adapters])
    table.waits(["second"], [])
    table.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    last = text[text.rindex("tokens/s") :]
    assert re.search(r"first +│ running +│", last)
    assert re.search(r"second +│ waiting +│", last)


def test_pace_is_tokens_over_seconds() -> None:
    pace = Pace()
    assert pace.tokens_per_second("a") is None
    pace.add("a", 100, 0.5)
    assert pace.tokens_per_second("a") == 200
    pace.add("a", 300, 1.5)
    assert pace.tokens_per_second("a") == pytest.approx(120 / 0.6)


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 65.4, 3599.6, 7384)] == ["0:00", "1:05", "1:00:00", "2:03:04"]


def test_smoothing_is_the_mean_of_neighbours() -> None:
    assert smooth([1.0, 3.0]) == [1.0, 3.0]
    ramp = [float(i) for i in range(100)]
    assert smooth(ramp)[2:-2] == pytest.approx(ramp[2:-2])
    assert smooth([0.0] * 50 + [5.0] + [0.0] * 49)[46:55] == pytest.approx([0, 0, 1, 1, 1, 1, 1, 0, 0])


def test_table_leaves_out_columns_without_values() -> None:
    entry = {
        "state": "finished",
        "step": 3,
        "max_steps": 3,
        "loss": 1.5,
        "eval_loss": {"before": 2.0, "after": 1.0},
        "eval_exact_match": {"before": None, "after": None},
    }
    rows = result_table({"status": "finished", "adapters": {"a": entry}})
    assert rows == [
        ["adapter", "state", "step", "loss", "eval loss before", "after"],
        ["a", "finished", "3/3", "1.5000", "2.0000", "1.0000"],
    ]
    assert aligned([["x", "yy"], ["long", "z"]]) == "x     yy\nlong  z"


@pytest.mark.parametrize("count", [1, 20])
def test_picture_grows_with_the_adapters(tmp_path: Path, count: int) -> None:
    names = [f"adapter-{index}" for index in range(count)]
    records = [
        {"adapter": name, "step": step, "loss": 2.0 / (step + 1), "eval_loss": 1.0}
        for name in names
        for step in range(1, 5)
    ]
    plot_losses(tmp_path / "loss.png", names, records)
    content = (tmp_path / "loss.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    # at least 300 x 200 pixels for each panel
    columns = {1: 1, 20: 5}[count]
    assert width >= 300 * columns
    assert height >= 200 * -(-count // columns)
    assert len(set(content)) > 200  # not one flat colour
