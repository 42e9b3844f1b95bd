"""`mlora resume` and `mlora status`."""

import fcntl
import json
import shutil
import threading
from pathlib import Path

import pytest
from command_line import Run, bad_line, only_line
from mlora.cli.run_status import read_status
from mlora.errors import RunError
from mlora.store.run_folder import Metrics, is_running
from tiny_run import run_data, write_run


def test_resume_and_status_of_a_finished_run(run: Run, trained: Path) -> None:
    result = run("status", trained)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"finished: {trained}"
    assert "9/9" in result.stdout
    result = run("resume", trained)
    assert result.exit_code == 0
    assert "the run had ended already; nothing is left to train" in result.stdout


def test_status_of_an_unfinished_run(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "summary.json").unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:6]) + '{"adapter": "fi')
    result = run("status", copy)
    assert result.stdout.startswith(f"not running; `mlora resume {copy}` continues from its last checkpoint")
    assert [line.split()[1] for line in result.stdout.splitlines()[2:]] == ["unfinished", "unfinished"]
    summary = json.loads((trained / "summary.json").read_text())
    summary |= {"status": "running"}
    summary["adapters"]["first"]["state"] = "running"
    (copy / "summary.json").write_text(json.dumps(summary))
    assert [line.split()[1] for line in run("status", copy).stdout.splitlines()[2:]] == [
        "unfinished",
        "finished",
    ]
    with Metrics(copy / "metrics.jsonl"):
        assert run("status", copy).stdout.startswith(f"running: {copy}")
    (copy / "metrics.jsonl").unlink()
    shutil.rmtree(copy / "checkpoints")
    result = run("status", copy)
    assert "continues from the start: it has no checkpoint" in result.stdout
    assert "is not a run folder: it has no config.yaml" in only_line(run("status", tmp_path))
    assert "is not a run folder: it has no config.yaml" in only_line(run("resume", tmp_path))


@pytest.mark.parametrize(
    ("state", "saved", "after"), [("cancelled", None, False), ("cancelled", None, True), ("stopped", 3, True)]
)
def test_status_has_the_summarys_values_of_ended_tasks(
    run: Run, trained: Path, tmp_path: Path, state: str, saved: int | None, after: bool
) -> None:
    """`after` is of the saved weights, or of the last step if none are; the metrics have more."""
    copy = shutil.copytree(trained, tmp_path / "copy")
    records = [{"adapter": "first", "step": step, "eval_loss": 1.0 + step} for step in (0, 3)]
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    summary = json.loads((copy / "summary.json").read_text())
    pair = {"before": 1.0, "after": 4.0 if after else None}
    summary["adapters"]["first"] |= {"state": state, "step": 3, "saved_step": saved, "eval_loss": pair}
    (copy / "summary.json").write_text(json.dumps(summary))
    found = json.loads(run("status", copy, "--json").stdout)
    assert {task["name"]: task["eval_loss"] for task in found["tasks"]}["first"] == pair
    assert ("after" in run("status", copy).stdout.splitlines()[1]) == after


def test_a_damaged_summary_is_written_anew(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    summary = copy / "summary.json"
    before = json.loads(summary.read_text())
    summary.write_text("{")
    line = only_line(run("resume", copy))
    assert line.endswith(f"; remove it, `mlora resume {copy}` writes it anew")
    summary.unlink()
    assert run("resume", copy).exit_code == 0
    after = json.loads(summary.read_text())
    assert after["adapters"] == before["adapters"]
    assert after["status"] == before["status"]


@pytest.mark.draws
def test_a_run_that_was_killed_while_it_drew_its_plot(run: Run, trained: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(trained, tmp_path / "copy")
    (copy / "loss.png").write_bytes(b"of an earlier part")
    (copy / ".loss.png.0123abcd.tmp").write_bytes(b"the beginning")
    result = run("resume", copy)
    assert result.exit_code == 0, result.stderr
    assert "the run had ended already; nothing is left to train" in result.stdout
    assert (copy / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(copy.rglob("*.tmp"))


def test_status_of_a_killed_run_has_no_values_after_the_end(run: Run, trained: Path, tmp_path: Path) -> None:
    """Its latest ones have columns of their own: accuracy, exact match and an own loss's, as the loss."""
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "summary.json").unlink()
    values = {"eval_loss": 1.0, "eval_accuracy": 0.5, "eval_exact_match": 0.25, "eval_apart": 3.0}
    records = [{"adapter": "first", "step": step, **values} for step in (0, 3)]
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    titles, first, *_ = read_status(copy).table()
    shown = dict(zip(titles, first, strict=True))
    assert "after" not in titles
    assert shown["latest eval loss"] == "1.0000, step 3"
    assert shown["latest eval accuracy"] == shown["eval accuracy before"] == "50.0%"
    assert shown["latest eval exact match"] == shown["exact match before"] == "25.0%"
    assert shown["latest eval apart"] == shown["eval apart before"] == "3"


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("config.yaml", "adapters: 3", "config.yaml: is not a run's config: base_model: is missing"),
        ("summary.json", "{}", "summary.json: is not a run's summary: status: is missing"),
        ("summary.json", "{oops", "summary.json: is not a run's summary: Invalid JSON"),
        (
            "summary.json",
            '{"status": "finished", "seconds": 1, "adapters": {"first": {"step": 1}}}',
            "summary.json: is not a run's summary: adapters.first.state: is missing",
        ),
        ("metrics.jsonl", "3\n", "metrics.jsonl:1: is not a line of metrics: no step"),
        ("metrics.jsonl", '{"adapter": [], "step": 1}\n', "metrics.jsonl:1: is not a line of metrics: no"),
    ],
)
def test_status_of_broken_files(
    run: Run, trained: Path, tmp_path: Path, file: str, text: str, expected: str
) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / file).write_text(text)
    assert expected in only_line(run("status", folder))


def test_folder_in_the_place_of_metrics(run: Run, trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").mkdir()
    line = f"error: {folder}/metrics.jsonl: cannot be read: Is a directory"
    assert only_line(run("status", folder)) == line
    assert only_line(run("train", folder / "config.yaml", "--set", f"output_dir={folder}")) == line


def test_lock_is_had_though_another_process_looks_at_it(tmp_path: Path) -> None:
    """As `mlora status` does for an instant."""
    path = tmp_path / "metrics.jsonl"
    path.touch()
    with open(path, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(RunError, match="another process is running this run"):
            Metrics(path)
        timer = threading.Timer(0.02, lambda: fcntl.flock(other, fcntl.LOCK_UN))
        timer.start()
        with Metrics(path):
            timer.join()
            assert is_running(path)
    assert not is_running(path)


def test_resume_of_a_failed_run_names_the_fault_again(run: Run, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path, defaults={"max_steps": 1})
    bad_line(tmp_path, "{oops")
    assert run("train", write_run(tmp_path, data)).exit_code == 1
    assert only_line(run("resume", tmp_path / "run")).startswith("error: first: refused: ")
