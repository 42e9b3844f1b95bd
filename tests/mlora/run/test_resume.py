"""Resuming: bit for bit the run that was not interrupted, and files that are whole or not there."""

import fcntl
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from limited_runs import Watching
from mlora.config.config_file import resolve_config
from mlora.errors import RunError
from mlora.run.reporter import Reporter
from mlora.run.run import resume, train
from mlora.store.checkpoint import FORMAT, list_checkpoints, save_checkpoint
from mlora.store.run_folder import Metrics, RunFolder, read_metrics
from tiny_run import lines, random_tokens, run_data, weights, write_jsonl


class Interrupting(Reporter):
    """Sends a signal to this process after a number of optimizer steps of all adapters together."""

    def __init__(self, after: int, number: int = signal.SIGINT) -> None:
        self.left, self.number = after, number

    def step(self, task: Any, record: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


class Crashing(Reporter):
    """Raises, as if the process died, after a number of optimizer steps."""

    def __init__(self, after: int) -> None:
        self.left = after

    def step(self, task: Any, record: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise ConnectionAbortedError("died")


@pytest.fixture(scope="module")
def undisturbed(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not interrupted, trained once."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(resolve_config(run_data(tiny_base, folder) | {"output_dir": "whole"}, folder=folder))
    return folder / "whole"


@pytest.fixture
def whole(undisturbed: Path, tiny_base: Path, tmp_path: Path) -> dict[str, Any]:
    """A copy of a run that was not interrupted, in the folder `whole`; returns the data of its config."""
    shutil.copytree(undisturbed, tmp_path / "whole")
    return run_data(tiny_base, tmp_path)


@pytest.mark.parametrize(
    "after", [pytest.param(1, marks=pytest.mark.nightly), 4, pytest.param(8, marks=pytest.mark.nightly), 13]
)
def test_an_interrupted_run_resumes_bit_for_bit(whole: dict[str, Any], tmp_path: Path, after: int) -> None:
    result = train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(after))
    assert (result.status, result.exit_code) == ("interrupted", 130)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(lines(tmp_path / "run")) < len(lines(tmp_path / "whole"))
    second = resume(tmp_path / "run", reporter=Interrupting(1, signal.SIGTERM))
    assert second.exit_code == 128 + signal.SIGTERM
    assert resume(tmp_path / "run").exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert len(weights(tmp_path / "run")) == 2


def test_a_run_resumes_after_the_adapter_on_the_head_has_left(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][1]["name"] = "training"  # both names are attributes of modules that hold adapters
    data["adapters"][0] |= {
        "name": "moves",
        "max_steps": 1,
        "lora": {"r": 4, "target_modules": ["q_proj", "lm_head"]},
    }
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    result = train(resolve_config(data, folder=tmp_path), reporter=Interrupting(5))
    assert result.adapters["moves"].state == "finished"
    assert resume(tmp_path / "run").exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_the_data_of_an_adapter_that_has_ended_is_not_read_again(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    write_jsonl(tmp_path / "eval.jsonl", random_tokens(3, 5))
    data["datasets"].append({"name": "eval", "path": "eval.jsonl", "format": "tokens"})
    data["adapters"][0] |= {"max_steps": -1, "num_train_epochs": 0.5, "eval_dataset": "eval"}
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    result = train(resolve_config(data, folder=tmp_path), reporter=Interrupting(5))
    assert result.adapters["first"].state == "finished"
    (tmp_path / "one.jsonl").unlink()
    (tmp_path / "eval.jsonl").write_text("changed")
    again = resume(tmp_path / "run", reporter=Interrupting(2))  # its checkpoint, too, does without the data
    assert again.adapters["first"] == result.adapters["first"]
    assert again.adapters["first"].max_steps == 1
    assert resume(tmp_path / "run").exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_an_adapter_that_ended_with_a_checkpoint_asks_for_no_more(tiny_base: Path, tmp_path: Path) -> None:
    """Its last step is a multiple of `save_steps`, and the other one of its group goes on."""
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0] |= {"max_steps": 2, "save_steps": 2}
    data["adapters"][1] |= {"max_steps": 9, "save_steps": None, "gradient_accumulation_steps": 1}
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    names = [path.name for path in list_checkpoints(tmp_path / "whole" / "checkpoints")]
    assert names == ["step-00000006.pt", "step-00000009.pt"]  # at the end there is one, for tasks that come
    result = train(resolve_config(data, folder=tmp_path), reporter=Interrupting(9))
    assert result.adapters["first"].state == "finished"
    assert resume(tmp_path / "run").exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_an_ended_adapter_that_is_lost_is_told_of(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["adapters"][0]["max_steps"] = 1
    train(resolve_config(data, folder=tmp_path), reporter=Interrupting(5))
    shutil.rmtree(tmp_path / "run" / "adapters" / "first")
    before = weights(tmp_path / "run")
    with pytest.raises(RunError, match=r"^first: has ended, but .*adapters/first is gone, .*; put it back"):
        resume(tmp_path / "run")
    assert weights(tmp_path / "run") == before


def test_the_data_of_a_running_adapter_is_needed(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(5))
    (tmp_path / "two.jsonl").unlink()
    with pytest.raises(RunError, match=r"first: .*two\.jsonl: cannot be read: No such file"):
        resume(tmp_path / "run")


def test_a_killed_run_resumes_from_its_last_checkpoint(whole: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(whole, folder=tmp_path), reporter=Crashing(9))
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"adapter": "first", "st')  # half a line, as a kill leaves it
    (tmp_path / "run" / "checkpoints" / ".step-00000099.pt.tmp").write_bytes(b"half")
    assert resume(tmp_path / "run").exit_code == 0
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_checkpoints_are_few_and_follow_save_steps(whole: dict[str, Any], tmp_path: Path) -> None:
    # `second` steps at each of its 9 iterations, `first` at every third one and ends at 18
    names = [path.name for path in list_checkpoints(tmp_path / "whole" / "checkpoints")]
    assert names == ["step-00000012.pt", "step-00000018.pt"]


def test_what_a_kill_leaves_of_an_adapter_is_removed(whole: dict[str, Any], tmp_path: Path) -> None:
    data = whole | {"output_dir": "killed"}
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(data, folder=tmp_path), reporter=Crashing(5))
    adapters = tmp_path / "killed" / "adapters"
    for name in (".first.ab_1xyz9", ".first.0123456789abcdef", ".first.mine"):  # the last one is no run's own
        (adapters / name).mkdir(parents=True)
        (adapters / name / "adapter_model.safetensors").write_bytes(b"half")
    resume(tmp_path / "killed")
    assert {path.name for path in adapters.iterdir()} == {"first", "second", ".first.mine"}


def test_files_and_links_of_others_stay(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(8))
    run = tmp_path / "run"
    others = ["notes.txt", "other-00000001.pt", "first-00000001.pt.mine", "first-1.pt", ".first.pt.tmp"]
    gone = ["first-00000001.pt", ".second.best-00000002.pt.tmp", "first.full-00000002.bin.new"]
    for folder in ("states", "finished"):
        (run / folder).mkdir(exist_ok=True)
        for name in (*others, *gone):
            (run / folder / name).write_bytes(b"mine")
    assert resume(run).exit_code == 0
    for folder in ("states", "finished"):
        left = {path.name for path in (run / folder).iterdir()}
        assert left >= set(others)
        assert left.isdisjoint(gone)
    assert weights(run) == weights(tmp_path / "whole")


@pytest.mark.parametrize("name", ["states", "finished", "checkpoints"])
def test_a_folder_of_states_that_is_a_link_is_refused(
    whole: dict[str, Any], tmp_path: Path, name: str
) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(8))
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    (run / name).mkdir(exist_ok=True)
    (run / name).rename(scratch)
    (scratch / "first-00000001.pt").write_bytes(b"of another run")
    (run / name).symlink_to(scratch)
    before = sorted(scratch.iterdir())
    with pytest.raises(RunError, match=rf"^{run}/{name}: is a link to {scratch}; move that folder here"):
        resume(run)
    assert sorted(scratch.iterdir()) == before


def test_resume_without_a_checkpoint_starts_anew(whole: dict[str, Any], tmp_path: Path) -> None:
    whole["defaults"]["save_steps"] = None
    with pytest.raises(ConnectionAbortedError):
        train(resolve_config(whole, folder=tmp_path), reporter=Crashing(3))
    said = Watching()
    assert resume(tmp_path / "run", reporter=said).exit_code == 0
    assert said.lines[0].endswith("has no checkpoint; training starts anew")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


def test_resume_of_a_finished_run_changes_nothing(whole: dict[str, Any], tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").rglob("*")}
    result = resume(tmp_path / "whole")
    assert (result.exit_code, result.status) == (0, "finished")
    assert result.adapters["first"].step == 6
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "whole").rglob("*")} == before


def test_a_moved_run_resumes_where_it_is(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(5))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert resume(tmp_path / "moved").exit_code == 0
    assert weights(tmp_path / "moved") == weights(tmp_path / "whole")
    assert not (tmp_path / "run").exists()


def test_an_unreadable_checkpoint_gives_way_to_the_one_before(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(9))
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    said = Watching()
    assert resume(tmp_path / "run", reporter=said).exit_code == 0
    assert said.lines[0] == f"{newest}: cannot be read: it is damaged or incomplete; trying the one before"
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    for path in list_checkpoints(tmp_path / "run" / "checkpoints"):
        path.write_bytes(b"no")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(
        RunError, match="no checkpoint is whole; put the file back, or train anew with `mlora"
    ):
        resume(tmp_path / "run")


def test_a_damaged_later_checkpoint_pushes_out_no_whole_one(tmp_path: Path) -> None:
    """A run that resumed before it, and keeps one, removed the one that it had just saved."""
    save_checkpoint(tmp_path, 8, {}, keep=2)
    (tmp_path / "step-00000020.pt").write_bytes(b"damaged")
    names = []
    for iteration in (10, 15, 25):
        save_checkpoint(tmp_path, iteration, {}, keep=1)
        names.append([int(path.stem[5:]) for path in list_checkpoints(tmp_path)])
    assert names == [[10, 20], [15, 20], [25]]


def test_resume_of_a_run_that_another_process_ends_meanwhile(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "whole")
    copy = RunFolder(shutil.copytree(folder.path, tmp_path / "copy"))
    copy.summary.unlink()
    before = copy.metrics.read_bytes()
    with Metrics(copy.metrics) as other:

        def end() -> None:
            shutil.copy(folder.summary, copy.summary)
            other.close()

        timer = threading.Timer(0.05, end)
        timer.start()
        result = resume(copy.path)
        timer.join()
    assert result.adapters.keys() == {"first", "second"}
    assert copy.metrics.read_bytes() == before


def test_a_file_that_is_no_checkpoint_is_one_line(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(4))
    torch.save([1], list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    with pytest.raises(RunError, match="was written by another version of mlora"):
        resume(tmp_path / "run")


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (dict.clear, "is not a checkpoint of a run: iteration: is missing"),
        (lambda c: c.update(metrics_bytes="many"), "a run: metrics_bytes: Input should be a valid integer"),
        (
            lambda c: c.update(metrics_bytes=10**15),
            "metrics.jsonl: is damaged: expected 1000000000000000 bytes",
        ),
        (lambda c: c["tasks"].pop("first"), "is not a checkpoint of a run: lacks tasks.first"),
        (lambda c: c["adapters"].clear(), "is not a checkpoint of a run: lacks adapters.first"),
        (lambda c: c["adapters"]["first"].pop("moments"), "a run: lacks adapters.first.moments"),
    ],
)
def test_a_checkpoint_that_lacks_something_gives_way_to_the_one_before(
    whole: dict[str, Any], tmp_path: Path, break_it: Callable[[dict[str, Any]], object], expected: str
) -> None:
    path = broken_checkpoint(whole, tmp_path, break_it)
    said = Watching()
    assert resume(tmp_path / "run", reporter=said).exit_code == 0
    assert said.lines[0].startswith(f"{path}: ")
    assert expected in said.lines[0]
    assert said.lines[0].endswith("; trying the one before")
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda c: c["tasks"]["first"].update(step="x"), "tasks.first.step: Input should be a valid integer"),
        (lambda c: c["adapters"]["first"].update(weights=3), "not hold an adapter's state"),
    ],
)
def test_a_checkpoint_of_other_contents_is_one_line(
    whole: dict[str, Any], tmp_path: Path, break_it: Callable[[dict[str, Any]], object], expected: str
) -> None:
    broken_checkpoint(whole, tmp_path, break_it)
    with pytest.raises(RunError, match=expected) as error:
        resume(tmp_path / "run")
    assert "\n" not in str(error.value)


def broken_checkpoint(
    data: dict[str, Any], folder: Path, break_it: Callable[[dict[str, Any]], object]
) -> Path:
    """Interrupts a run and changes the content of its newest checkpoint."""
    train(resolve_config(data, folder=folder), reporter=Interrupting(4))
    path = list_checkpoints(folder / "run" / "checkpoints")[-1]
    checkpoint = torch.load(path, weights_only=True)
    break_it(checkpoint)
    torch.save(checkpoint | {"format": FORMAT}, path)
    return path


def test_changed_data_is_refused(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(5))
    write_jsonl(tmp_path / "one.jsonl", random_tokens(11, seed=77))
    with pytest.raises(
        RunError, match=r"first: its data \(\S+one\.jsonl\) changed since the checkpoint; put"
    ):
        resume(tmp_path / "run")


def test_a_changed_config_is_refused(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(5))
    path = tmp_path / "run" / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("r: 7", "r: 8"))
    with pytest.raises(RunError, match=r"config\.yaml: adapters\[1\]\.lora\.r changed since the checkpoint"):
        resume(tmp_path / "run")
    path.write_text(text.replace("save_steps: 2", "save_steps: 5"))  # says nothing about what is computed
    assert resume(tmp_path / "run").exit_code == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_run_at_work_is_left_alone(whole: dict[str, Any], tmp_path: Path) -> None:
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(5))
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is running this run"):
            resume(tmp_path / "run")
        with pytest.raises(RunError, match="another process is running the run in"):
            train(resolve_config(whole, folder=tmp_path), overwrite=True)


def test_training_outside_of_the_main_thread(whole: dict[str, Any], tmp_path: Path) -> None:
    results = []
    config = resolve_config(whole, folder=tmp_path)
    thread = threading.Thread(target=lambda: results.append(train(config)))
    thread.start()
    thread.join()
    assert results[0].exit_code == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond a size: what a full disk looks like to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_checkpoint_before(whole: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(4))
    before = {path: path.read_bytes() for path in list_checkpoints(folder / "checkpoints")}
    size = max(path.stat().st_size for path in folder.rglob("*.pt"))
    with small_files(size // 2), pytest.raises(RunError) as error:
        resume(folder)
    assert "cannot be saved: File too large" in str(error.value)
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in list_checkpoints(folder / "checkpoints")} == before
    assert not list(folder.rglob("*.tmp"))
    assert resume(folder).exit_code == 0
    assert lines(folder) == lines(tmp_path / "whole")


def test_a_full_disk_while_an_adapter_is_saved(whole: dict[str, Any], tmp_path: Path) -> None:
    whole["defaults"]["save_steps"] = None
    train(resolve_config(whole, folder=tmp_path), reporter=Interrupting(4))
    size = (tmp_path / "whole" / "metrics.jsonl").stat().st_size + 500
    assert size < min(len(content) for content in weights(tmp_path / "whole").values())
    with small_files(size), pytest.raises(RunError) as error:
        resume(tmp_path / "run")
    assert str(tmp_path / "run" / "adapters") in str(error.value)
    assert "cannot be saved: " in str(error.value)
    assert resume(tmp_path / "run").exit_code == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_full_disk_while_metrics_are_written(whole: dict[str, Any], tmp_path: Path) -> None:
    whole["defaults"] = {"max_steps": 250, "save_steps": None}
    whole["adapters"][1]["max_steps"] = 250
    with small_files(32_000), pytest.raises(RunError) as error:
        train(resolve_config(whole, folder=tmp_path))
    assert str(error.value).startswith(f"{tmp_path}/run/metrics.jsonl: cannot be written: ")
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) > 100


def test_a_full_disk_while_the_queue_is_made(whole: dict[str, Any], tmp_path: Path) -> None:
    with small_files(6000), pytest.raises(RunError) as error:
        train(resolve_config(whole, folder=tmp_path))
    assert str(error.value) == f"{tmp_path}/run/queue.sqlite: cannot be used: disk I/O error"
    assert train(resolve_config(whole, folder=tmp_path), overwrite=True).exit_code == 0


def test_old_checkpoints_go_only_after_the_new_one_is_whole(tmp_path: Path) -> None:
    for iteration in (3, 20, 100):
        save_checkpoint(tmp_path, iteration, {"value": iteration}, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000020.pt", "step-00000100.pt"]
