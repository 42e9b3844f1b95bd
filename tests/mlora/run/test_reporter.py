"""What a run shows: lines, the live table, the table at the end, the picture."""

import io
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from mlora.cli.live_table import LiveTable, short_names
from mlora.cli.tables import aligned, result_table
from mlora.config.config_file import resolve_config
from mlora.model.base_info import BaseInfo
from mlora.run.reporter import Pace, PlainLines, clock
from mlora.run.run import train
from mlora.store.loss_plot import plot_losses, smooth
from mlora.tasks.result import AdapterResult, RunResult
from mlora.tasks.task import Progress, Task, TaskBuilder
from rich.console import Console
from tiny_run import run_data, write_jsonl


def test_live_table_has_a_row_for_each_adapter(tiny_base: Path, tmp_path: Path) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=100, highlight=False)
    data = run_data(tiny_base, tmp_path)
    data["defaults"]["max_length"] = 8
    train(resolve_config(data, folder=tmp_path), reporter=LiveTable(console))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    last = text[text.rindex("adapter ") :]
    assert re.search(r"first +finished +6/6 +\d\.\d{4} +\d\.\d{4} *\n", last)
    assert re.search(r"second +finished +9/9 +\d\.\d{4} *\n", last)
    assert re.search(r"\n2 adapters: 2 finished; 15 of 15 steps, 0 tokens/s", last)
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
    last = text[text.rindex("adapter ") :]
    assert re.search(r"first +running ", last)
    assert re.search(r"second +waiting ", last)
    assert "2 adapters: 1 running, 1 waiting; 0 of 15 steps" in last


def test_labels_are_told_at_the_start(tiny_base: Path, tmp_path: Path) -> None:
    """Their number and their names, shortened; of a regression, how many numbers."""
    lines = {
        "mood": ["good", "bad", "a name of a label that is too long", "a", "b", "c", "two\nlines"],
        "length": [0.5, 1],
        "place": [0, 2],
    }
    counts = {"length": {"num_labels": 1}, "place": {"num_labels": 3}}
    data = run_data(tiny_base, tmp_path)
    lora = {"task_type": "SEQ_CLS", "target_modules": ["q_proj"]}
    for name, labels in lines.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [{"input_ids": [5, 6], "label": label} for label in labels])
        data["datasets"].append({"name": name, "path": f"{name}.jsonl", "format": "classification"})
        data["adapters"].append({"name": name, "dataset": name, "lora": lora, **counts.get(name, {})})
    config = resolve_config(data, folder=tmp_path)
    builder = TaskBuilder(config, BaseInfo(config.base_model, config.base_folder))
    tasks = [builder.build(adapter) for adapter in config.adapters[1:]]
    names = "7 labels (a, a name of a label that …, b, bad, c, good and 1 more)"
    out, drawn = io.StringIO(), io.StringIO()
    PlainLines(out).start(tasks)
    assert out.getvalue().splitlines() == [
        "second: 7 samples, 9 steps",
        f"mood: 7 samples, 6 steps, {names}",
        "length: 2 samples, 6 steps, a number",
        "place: 2 samples, 6 steps, 3 labels",
    ]
    table = LiveTable(Console(file=drawn, force_terminal=True, width=100, highlight=False))
    table.start(tasks)
    table.joined(tasks[1], tasks)
    table.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    assert [text.count(line) for line in (f"mood: {names}", "length: a number", "place: 3 labels")] == [
        2,
        1,
        1,
    ]


PREFIXES = ("", "customer-7-english-sentiment-")


def forty(base: Path, folder: Path, prefix: str) -> list[Task]:
    """Tasks whose names differ in their last characters, half way through."""
    config = resolve_config(run_data(base, folder), folder=folder)
    task = TaskBuilder(config, BaseInfo(config.base_model, config.base_folder)).build(config.adapters[0])
    progress = Progress(step=1000, loss=12.3456, evaluations=[{"step": 1000, "eval_loss": 12.3456}])
    names = [f"{prefix}rank-{number}" for number in range(40)]
    tasks = [replace(task, config=task.config.model_copy(update={"name": name})) for name in names]
    return [replace(task, total_steps=2000, progress=replace(progress)) for task in tasks]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_live_table_of_forty_adapters_fits(tiny_base: Path, tmp_path: Path, prefix: str) -> None:
    """At 80 columns and 24 lines: totals, who waits, and names that differ."""
    tasks = forty(tiny_base, tmp_path, prefix)
    console = Console(file=(drawn := io.StringIO()), force_terminal=True, width=80, height=24)
    table = LiveTable(console)
    for task in tasks[:5]:
        task.progress.state = "finished"
    tasks[30].progress.state = "stopped"
    table.start(tasks)
    for task in tasks:
        table.step(task, {"tokens": 1_000_000, "seconds": 100.0})
    table.waits([task.name for task in tasks[10:25]], [])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.getvalue())
    table.close()
    shown = [line.rstrip() for line in text[text.rindex("adapter ") :].splitlines()]
    assert len(shown) <= 24
    assert all(len(line) <= 80 for line in shown)
    rows = [line.split() for line in shown if "/2000" in line]
    assert len(rows) >= 19
    assert len({row[0] for row in rows}) == len(rows)
    assert [row[0].rpartition("-")[2] for row in rows][-2:] == ["38", "39"]
    states = [row[1] for row in rows]
    assert states.count("running") == min(19, len(rows))  # those that train come first
    assert rows[-1][1:] == ["running", "1000/2000", "12.3456", "12.3456", "10000", "27:46:40"]
    totals = " ".join(" ".join(shown[len(rows) + 1 :]).split())
    assert totals.startswith("40 adapters: 19 running, 15 waiting, 5 finished, 1 stopped, ")
    assert f", {40 - len(rows)} not shown; 40000 of 80000 steps, 190000 tokens/s" in totals


def test_names_are_cut_where_they_still_differ() -> None:
    assert short_names(["a", "bc"], 8) == ["a", "bc"]
    assert short_names(["first-long-name", "other"], 9) == ["firs…name", "other"]
    heads = [f"{number}-of-the-same-kind" for number in range(12)]
    tails = [f"of-the-same-kind-{number}" for number in range(12)]
    middles = [f"same-kind-{number}-same-kind" for number in range(12)]
    for names in (heads, tails, middles):
        cut = short_names(names, 10)
        assert len(set(cut)) == 12
        assert all(len(name) <= 10 for name in cut)
    assert short_names(middles, 10)[3] == "4 …me-kind"


def test_pace_is_tokens_over_seconds() -> None:
    pace = Pace()
    assert pace.tokens_per_second("a") is None
    pace.add("a", 100, 0.5)
    assert pace.tokens_per_second("a") == 200
    pace.add("a", 300, 1.5)
    assert pace.tokens_per_second("a") == pytest.approx(120 / 0.6)


def test_time_left_foresees_that_others_end_before() -> None:
    """Each micro-batch takes 0.1 s; one task accumulates two of them and trains twice as long."""
    pace, told = Pace(), []
    tasks = [Timed("a", 60, 1), Timed("b", 60, 2)]
    for iteration in range(1, 120):
        running = [task for task in tasks if task.progress.state == "running"]
        for task in running:
            progress = task.progress
            progress.batches = iteration
            if iteration % task.accumulation == 0:
                progress.step += 1
                warm_up = 5.0 if progress.step == 1 else 0.0
                seconds = 0.1 * len(running) * task.accumulation + warm_up
                pace.add(task.name, 10 * task.accumulation, seconds)
            progress.state = "finished" if progress.step == task.total_steps else "running"
        told.append(pace.left(tasks[1], tasks))
    assert told[0] == ""
    # 60 more iterations alone after those with the other
    assert told[19] == clock(40 * 0.2 + 60 * 0.1)
    assert told[39] == clock(20 * 0.2 + 60 * 0.1)
    assert told[79] == clock(40 * 0.1)


class Timed:
    def __init__(self, name: str, total_steps: int, accumulation: int) -> None:
        self.name, self.total_steps, self.accumulation = name, total_steps, accumulation
        self.progress = Progress()


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 65.4, 3599.6, 7384)] == ["0:00", "1:05", "1:00:00", "2:03:04"]


def test_smoothing_is_the_mean_of_neighbours() -> None:
    assert smooth([1.0, 3.0]).tolist() == [1.0, 3.0]
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


def test_metrics_have_columns_where_an_adapter_has_them() -> None:
    pairs = {"rewards/accuracies": 0.75, "rewards/margins": 0.5, "logps/chosen": -3.0}
    evaluated = {name: {"before": value / 2, "after": value} for name, value in pairs.items()}
    adapters = {
        "dpo": AdapterResult("finished", step=3, max_steps=3, metrics=pairs, eval_metrics=evaluated),
        "orpo": AdapterResult("finished", step=3, max_steps=3, metrics=pairs),
        "labels": AdapterResult(
            "finished",
            step=3,
            max_steps=3,
            metrics={"accuracy": 0.5},
            eval_accuracy={"before": 0, "after": 1},
        ),
        "plain": AdapterResult("finished", step=3, max_steps=3),
        "own": AdapterResult("finished", step=3, max_steps=3, metrics={"apart": 12.3456, "kl": 1.0}),
    }
    rows = result_table(RunResult("finished", Path(), 1.0, adapters).summary())
    assert rows[0] == [
        *("adapter", "state", "step", "reward accuracy", "reward margin", "apart"),
        *("eval accuracy before", "after", "eval reward accuracy before", "after"),
        *("eval reward margin before", "after"),
    ]
    assert [row[3:] for row in rows[1:]] == [
        ["", "", "", "", "", "37.5%", "75.0%", "0.2500", "0.5000"],
        ["75.0%", "0.5000", *[""] * 7],
        ["", "", "", "0.0%", "100.0%", *[""] * 4],
        [""] * 9,
        ["", "", "12.35", *[""] * 6],
    ]


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
