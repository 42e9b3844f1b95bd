"""The queue's file: many processes at once, and whatever can be wrong with it."""

import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlora.errors import RunError
from mlora.store.queue import TaskQueue, has_news

ASKING = """
import sys
from pathlib import Path
from mlora.store.queue import TaskQueue
for number in range(50):
    with TaskQueue(Path(sys.argv[1])) as queue:
        queue.ask("pause", f"{sys.argv[2]}-{number}")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a queue that is not there yet."""
    return tmp_path / "queue.sqlite"


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """No file of this process can grow beyond these bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_requests_come_out_as_they_went_in(path: Path) -> None:
    with TaskQueue(path) as queue:
        queue.changed()
        assert not queue.changed()
        with TaskQueue(path) as other:
            assert other.ask("submit", "a", {"adapter": {"name": "a"}}) == 1
            assert other.ask("cancel", "a") == 2
        assert queue.changed()
        first, second = queue.requests()
        assert (first.number, first.kind, first.task) == (1, "submit", "a")
        assert first.content == {"adapter": {"name": "a"}}
        assert (second.kind, second.content) == ("cancel", {})
        assert queue.requests(after=1) == [second]


def test_the_journal_says_what_was_taken(path: Path) -> None:
    assert not has_news(path)
    with TaskQueue(path) as queue:
        assert queue.taken() == 0
        queue.ask("pause", "a")
        assert has_news(path)
        queue.write_entry(0, {"taken": 0})
        queue.write_entry(7, {"taken": 1})
        assert queue.taken() == 1
        assert not has_news(path)
        queue.forget_entries(after=0)
        assert queue.entries() == {0: {"taken": 0}}
        assert has_news(path)


def test_views_are_replaced(path: Path) -> None:
    with TaskQueue(path) as queue:
        assert queue.views() == ({}, {})
        queue.show({"b": {"state": "waiting"}, "a": {}}, {"memory": None})
        views, run = queue.views()
        assert list(views.items()) == [("b", {"state": "waiting"}), ("a", {})]
        assert run == {"memory": None}
        queue.show({"a": {}})
        assert queue.views() == ({"a": {}}, {})


def ask_and_fail(queue: TaskQueue) -> None:
    with queue.alone():
        queue.ask("pause", "a")
        raise RunError("never mind")


def test_what_is_asked_alone_is_taken_together_or_not_at_all(path: Path) -> None:
    with TaskQueue(path) as queue, TaskQueue(path) as other:
        with pytest.raises(RunError, match="never mind"):
            ask_and_fail(queue)
        assert other.requests() == []
        with queue.alone():
            queue.ask("pause", "a")
            assert other.requests() == []
            queue.ask("pause", "b")
        assert [request.task for request in other.requests()] == ["a", "b"]


def test_two_processes_ask_at_once(path: Path) -> None:
    askers = [subprocess.Popen([sys.executable, "-c", ASKING, path, who]) for who in ("left", "right")]
    assert [asker.wait(timeout=120) for asker in askers] == [0, 0]
    with TaskQueue(path) as queue:
        requests = queue.requests()
    assert [request.number for request in requests] == list(range(1, 101))
    for who in ("left", "right"):
        own = [request.task for request in requests if request.task.startswith(who)]
        assert own == [f"{who}-{number}" for number in range(50)]


def test_a_locked_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TaskQueue(path).close()
    monkeypatch.setattr("mlora.store.queue._PATIENCE", 0.01)
    other = sqlite3.connect(path, isolation_level=None)
    with TaskQueue(path) as queue:
        other.execute("BEGIN IMMEDIATE")
        assert queue.requests() == []
        with pytest.raises(RunError) as error:
            queue.ask("pause", "a")
        line = "cannot be used: database is locked; another process is using it; try again later"
        assert str(error.value) == f"{path}: {line}"
        other.execute("COMMIT")
        assert queue.ask("pause", "a") == 1
    other.close()


@pytest.mark.parametrize("content", [b"not a database at all", b"SQLite format 3\0" + bytes(range(256)) * 30])
def test_a_damaged_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"cannot be used: .*; once the run has ended, restore an intact"):
        TaskQueue(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE requests SET content = '{oops'",
        "UPDATE requests SET content = '3'",
        "UPDATE journal SET entry = '{}'",
        "UPDATE journal SET entry = x'ff00'",
        "DROP TABLE journal",
    ],
)
def test_damaged_content(path: Path, damage: str) -> None:
    with TaskQueue(path) as queue:
        queue.ask("pause", "a")
        queue.write_entry(0, {"taken": 0})
    other = sqlite3.connect(path)
    with other:
        other.execute(damage)
    other.close()
    with pytest.raises(RunError, match=r"queue\.sqlite: "):
        has_news(path)


def test_a_file_of_another_version(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(
        RunError, match="was written by another version of mlora; use that one, or train anew"
    ):
        TaskQueue(path)


def test_a_read_only_file_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TaskQueue(path) as queue:
        queue.ask("pause", "a")
    connect = sqlite3.connect

    def reading(address: str, **options: Any) -> sqlite3.Connection:
        return connect(f"{address}?mode=ro", **options)

    monkeypatch.setattr("mlora.store.queue.sqlite3.connect", reading)
    with TaskQueue(path) as queue:
        assert len(queue.requests()) == 1
        with pytest.raises(RunError, match="cannot be used: attempt to write a readonly database"):
            queue.ask("pause", "b")


def test_no_file_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be used: unable to open database file"):
        TaskQueue(tmp_path / "nowhere" / "queue.sqlite")


def test_a_full_disk(path: Path) -> None:
    with TaskQueue(path) as queue:
        queue.ask("pause", "a")
        with small_files(path.stat().st_size + 4096), pytest.raises(RunError, match="cannot be used: "):
            queue.ask("submit", "b", {"text": "x" * 100_000})
        assert [request.task for request in queue.requests()] == ["a"]
        assert queue.ask("submit", "b", {"text": "x" * 100_000}) == 2
