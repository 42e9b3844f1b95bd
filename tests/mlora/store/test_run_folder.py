"""A run's folder on odd file systems, with links in it, moved away, and as killed processes leave it."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from mlora.config.config_file import resolve_config
from mlora.durable import sync_path, temporary
from mlora.errors import RunError
from mlora.run.reporter import Reporter
from mlora.run.run import resume, train
from mlora.run.trackers.tracked_runs import TrackedRuns
from mlora.store.disk import write_file
from mlora.store.new_folder import new_folder
from mlora.store.queue import TaskQueue
from mlora.store.run_folder import Metrics, RunFolder, is_running
from mlora.store.samples import append_samples, cut_samples
from sweep_data import sweep_data
from tiny_run import lines, run_data, weights, write_run

OWN = [
    *("config.yaml", "loss.png", "report.html", "timeline.png", "sweep.csv", "sweep.png", "queue.sqlite"),
    *("metrics.jsonl", "samples.jsonl", "tracking.jsonl"),
    *("summary.json", "environment.json", "trace.json", "times.json"),
    *("states/a-00000003.pt", "states/a.best-00000003.pt", "states/a.full-00000003.bin"),
    *("finished/a-00000009.pt", "checkpoints/step-00000004.pt", "logs/a/events.out.tfevents.1.host"),
    *("adapters/a/adapter_config.json", "adapters/a/adapter_model.safetensors", "adapters/a/labels.json"),
    *("adapters/a/quantization.json", "adapters/a/README.md", "adapters/b/config.json"),
    *("best/adapter_model.safetensors", "best/README.md"),
]
OLD = [  # names of earlier versions, and of `save_adapter`
    *(".summary.json.tmp", ".report.html.tmp", "checkpoints/.step-00000004.pt.tmp"),
    *("states/a.full-00000003.bin.new", "adapters/a/.quantization.json.tmp"),
    *("adapters/.a.ab_1xyz9/adapter_config.json", "adapters/.a.0123456789abcdef/labels.json"),
    *("adapters/.b.tmp/1.safetensors", ".best.tmp/README.md", ".best.old/README.md"),
]
USERS = ["notes.txt", ".config.yaml.original", ".states.backup01/a", "summary.json.tmp", "adapters/.a.mine/x"]


def warned(_: str) -> None:
    """Takes a warning that a test does not ask about."""


def filled(path: Path, *names: str) -> RunFolder:
    """A folder with these files."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")
    return RunFolder(path)


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def test_what_killed_writers_leave_is_known_and_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    scratch = [str(temporary(Path(name))) for name in OWN]
    scratch += [f"{temporary(Path(name))}/1.safetensors" for name in ("best", "adapters/b")]
    folder = filled(run, *OWN, *scratch, *OLD)
    (run / "queue.sqlite.lock").mkdir()
    folder.check_contents(overwrite=True, inputs=[])
    with folder.take(warned):
        assert names(run) == sorted(OWN)
        folder.clear()
    assert sorted(path.name for path in run.iterdir()) == ["config.yaml", "metrics.jsonl"]


@pytest.mark.parametrize("name", USERS)
def test_what_a_user_put_there_stays(tmp_path: Path, name: str) -> None:
    folder = filled(tmp_path / "run", "config.yaml", name)
    with pytest.raises(RunError, match="was not written by a run; move it away before --overwrite"):
        folder.check_contents(overwrite=True, inputs=[])
    folder.take(warned).close()
    assert (tmp_path / "run" / name).is_file()


def _sweep(base: Path, folder: Path) -> dict[str, Any]:
    data = sweep_data(base, folder, search={"lora": {"r": {"choice": [2, 3]}}})
    data["sweep"] |= {"sampler": "grid", "trials": None}
    return data


def _full(base: Path, folder: Path) -> dict[str, Any]:
    data = run_data(base, folder, method="full")
    data["adapters"] = [data["adapters"][1]]
    del data["adapters"][0]["lora"]
    return data


@pytest.mark.draws
@pytest.mark.parametrize("data_of", [_sweep, _full])
def test_a_run_killed_at_any_write_can_be_overwritten(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_of: Callable[..., dict[str, Any]]
) -> None:
    """Just before each rename and each wait for the disk, all names in the folder are a run's own."""
    folder, times = RunFolder(tmp_path / "run"), []

    def wrap(name: str) -> None:
        plain = getattr(os, name)

        def wrapped(*arguments: Any) -> Any:
            if folder.config.is_file():
                folder.check_contents(overwrite=True, inputs=[])
                times.append(name)
            return plain(*arguments)

        monkeypatch.setattr(os, name, wrapped)

    for name in ("rename", "replace", "fsync", "unlink"):
        wrap(name)
    data = data_of(tiny_base, tmp_path) | {"output_dir": "run"}
    assert train(resolve_config(data, folder=tmp_path)).exit_code == 0
    assert len(times) > 20


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside of the run's folder."""
    path = tmp_path / "victim"
    path.write_bytes(b"precious\n")
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda path: Metrics(path)),
        ("samples.jsonl", lambda path: append_samples(path, [{"adapter": "a"}])),
        ("samples.jsonl", lambda path: cut_samples(path, 0)),
        ("tracking.jsonl", lambda path: TrackedRuns(path)),
        ("queue.sqlite", lambda path: TaskQueue(path)),
    ],
)
def test_files_that_grow_are_no_links(
    tmp_path: Path, victim: Path, name: str, write: Callable[[Path], object]
) -> None:
    path = tmp_path / name
    path.symlink_to(victim)
    with pytest.raises(RunError, match=f"^{path}: is a link.* put the file itself there$"):
        write(path)
    assert victim.read_bytes() == b"precious\n"


def test_a_pipe_in_the_place_of_metrics_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "metrics.jsonl")
    with pytest.raises(RunError, match=f"^{path}: is a link or no regular file"):
        Metrics(path)
    os.mkfifo(path := tmp_path / "queue.sqlite")
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=f"^{path}: is a pipe, a device or a folder; move it away$"):
        TaskQueue(path)
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(RunError, match=r"is not a run folder: its config\.yaml is no regular file$"):
        RunFolder(tmp_path).check_is_run()


@pytest.mark.parametrize("link", ["summary.json", ".summary.json.tmp"])
def test_files_that_are_replaced_are_not_written_through(tmp_path: Path, victim: Path, link: str) -> None:
    (tmp_path / link).symlink_to(victim)
    write_file(tmp_path / "summary.json", b"new")
    assert (victim.read_bytes(), (tmp_path / "summary.json").read_bytes()) == (b"precious\n", b"new")
    assert not (tmp_path / "summary.json").is_symlink()


@pytest.mark.parametrize("name", ["checkpoints", "states", "adapters", "adapters/a", "best", "logs/a"])
def test_own_folders_are_no_links(tmp_path: Path, name: str) -> None:
    folder = filled(tmp_path / "run", "config.yaml", "adapters/b/README.md", "logs/b/x")
    if name == "adapters":
        shutil.rmtree(folder.adapters)
    (folder.path / name).symlink_to(tmp_path)
    with pytest.raises(RunError, match=f"^{folder.path / name}: is a link to {tmp_path}; move that folder"):
        folder.take(warned)


def test_a_link_in_the_place_of_a_scratch_folder_is_not_emptied(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "away").mkdir()
    shutil.copy(victim, tmp_path / "away")
    (tmp_path / ".out.unfinished").symlink_to(tmp_path / "away")
    with (
        pytest.raises(RunError, match=r"--output: .*out cannot be written: "),
        new_folder(tmp_path / "out", "--output"),
    ):
        pass
    assert names(tmp_path / "away") == ["victim"]


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system as Lustre and NFS are without a lock service."""

    def flock(file: Any, kind: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


def sync_of_folders_fails(monkeypatch: pytest.MonkeyPatch, number: int = errno.EINVAL) -> None:
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.usefixtures("no_locks")
def test_a_folder_without_locks(tmp_path: Path, run: Run) -> None:
    told: list[str] = []
    folder = filled(tmp_path / "run", "config.yaml")
    with folder.take(told.append), folder.take(warned), TaskQueue(folder.queue) as queue:
        assert told == [
            f"{folder.path}: its file system has no locks, so nothing keeps other processes out; let none of "
            "them train or resume this run"
        ]
        assert is_running(folder.metrics) is None
        with queue.alone():
            assert (folder.path / "queue.sqlite.lock").is_dir()  # SQLite's own way without locks
            queue.ask("pause", "a")
        with TaskQueue(folder.queue) as other:
            assert [request.task for request in other.requests()] == ["a"]
    assert not (folder.path / "queue.sqlite.lock").exists()
    with new_folder(tmp_path / "out", "--output") as scratch:
        (scratch / "a").touch()
    assert names(tmp_path / "out") == ["a"]


@pytest.mark.usefixtures("no_locks")
def test_a_run_that_may_be_at_work_is_not_overwritten(tmp_path: Path) -> None:
    folder = filled(tmp_path / "run", "config.yaml", "metrics.jsonl")
    folder.write_summary({"status": "running", "seconds": 1.0, "adapters": {}})
    with pytest.raises(RunError, match=r"says that its run is at work.*remove .*summary\.json$"):
        folder.check_free(overwrite=True, inputs=[])
    folder.summary.unlink()
    folder.check_free(overwrite=True, inputs=[])


def test_a_lock_that_a_killed_process_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_locks: None
) -> None:
    monkeypatch.setattr("mlora.store.queue._PATIENCE", 0.1)
    folder = filled(tmp_path / "run", "metrics.jsonl")
    (held := folder.path / "queue.sqlite.lock").mkdir()
    with pytest.raises(RunError, match=f"if none is, a killed process has left {held}: remove that folder$"):
        TaskQueue(folder.queue)


def test_another_fault_of_a_lock_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: Any, kind: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RunError, match=r"metrics\.jsonl: cannot be written: Input/output error"):
        filled(tmp_path / "run").take(warned)


def test_names_that_cannot_be_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_of_folders_fails(monkeypatch)
    told: list[str] = []
    folder = filled(tmp_path / "run", "config.yaml")
    with folder.take(told.append):
        write_file(folder.summary, b"new")
    assert folder.summary.read_bytes() == b"new"
    assert told == [
        f"{folder.path}: its file system does not tell when a new file's name is on the disk; after a power "
        "failure the newest checkpoint may be missing"
    ]
    sync_of_folders_fails(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_path(tmp_path)


@pytest.mark.parametrize("no_locks", [errno.ENOLCK], indirect=True)
def test_a_run_on_a_folder_without_either(
    run: Run, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_locks: None
) -> None:
    sync_of_folders_fails(monkeypatch)
    path = write_run(tmp_path, run_data(tiny_base, tmp_path))
    result = run("train", path)
    assert result.exit_code == 0
    found = [line for line in result.stderr.splitlines() if "its file system" in line]
    assert len(found) == 2
    assert sorted(weights(tmp_path / "run")) == ["first", "second"]
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(summary.read_text().replace('"status": "finished"', '"status": "running"'))
    assert "running: " in (status := run("status", tmp_path / "run").stdout)
    assert ", or was killed: its file system has no locks that would tell" in status
    refused = run("train", path, "--overwrite")
    assert f"if no process runs it, remove {summary}" in refused.stderr
    summary.unlink()
    assert run("train", path, "--overwrite").exit_code == 0


class At(Reporter):
    """Calls a function after an adapter's step."""

    def __init__(self, step: int, call: Callable[[], object]) -> None:
        self.at, self.call = step, call

    def step(self, task: Any, record: dict[str, Any]) -> None:
        if (task.name, record["step"]) == ("second", self.at):
            self.call()


@pytest.mark.parametrize("step", [5, 9])  # within training, and just before an adapter is saved
def test_a_folder_that_is_moved_while_its_run_trains(tiny_base: Path, tmp_path: Path, step: int) -> None:
    data = run_data(tiny_base, tmp_path)
    train(resolve_config(data | {"output_dir": "whole"}, folder=tmp_path))
    run, moved = tmp_path / "run", tmp_path / "moved"
    with pytest.raises(RunError) as error:
        train(resolve_config(data, folder=tmp_path), reporter=At(step, lambda: run.rename(moved)))
    assert str(error.value) == (
        f"{run}: was moved to {moved} while the run trained; `mlora resume {moved}` goes on from its last "
        "checkpoint"
    )
    assert not run.exists()
    assert resume(moved).exit_code == 0
    assert lines(moved) == lines(tmp_path / "whole")
    assert weights(moved) == weights(tmp_path / "whole")


def test_a_folder_that_is_removed_while_its_run_trains(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["defaults"]["save_steps"] = None  # no thread writes into the folder meanwhile
    config = resolve_config(data, folder=tmp_path)
    with pytest.raises(RunError, match=r"metrics\.jsonl: was removed while the run trained, so the run ends"):
        train(config, reporter=At(3, lambda: shutil.rmtree(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_a_second_resume_at_the_same_time(tiny_base: Path, tmp_path: Path) -> None:
    config = resolve_config(run_data(tiny_base, tmp_path), folder=tmp_path)

    def die() -> None:
        raise ConnectionAbortedError("died")

    with pytest.raises(ConnectionAbortedError):
        train(config, reporter=At(3, die))

    def second() -> None:
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
        with pytest.raises(RunError, match="run: another process is running this run"):
            resume(tmp_path / "run")
        assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")} == before

    class Noting(Reporter):
        def note(self, line: str) -> None:
            if line.startswith("resuming"):
                second()

    assert resume(tmp_path / "run", reporter=Noting()).exit_code == 0
