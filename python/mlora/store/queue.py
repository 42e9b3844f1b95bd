"""An SQLite file in a run's folder: users' requests to the run, and the run's decisions.

Requests come from any process at any time. The run takes them at an iteration boundary. Before it acts, it
writes to the journal at which iteration it took them and what it decided. A killed run resumes from a
checkpoint and repeats its decisions at the same iterations, so its results do not depend on any clock.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from mlora.errors import RunError, first_fault, first_line
from mlora.store.run_folder import is_running

RequestType = Literal["submit", "cancel", "stop", "pause", "unpause"]
VERSION = 5
_PATIENCE = 10.0  # seconds to wait for another process's transaction
_RESTORE = (
    "; once the run has ended, restore an intact copy, or remove it and ask again for what it held; only "
    "checkpoints with submitted tasks or trials need it, and `mlora resume` says so"
)
_ADVICE = {
    sqlite3.SQLITE_BUSY: "; another process is using it; try again later",
    sqlite3.SQLITE_CORRUPT: _RESTORE,
    sqlite3.SQLITE_ERROR: _RESTORE,  # a table is missing
    sqlite3.SQLITE_NOTADB: _RESTORE,
}
_RUN = ""  # no task has this name
_TABLES = f"""
    CREATE TABLE requests (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL CHECK (kind IN {get_args(RequestType)}),
        task TEXT NOT NULL,
        content TEXT NOT NULL,
        at REAL NOT NULL
    );
    CREATE TABLE journal (iteration INTEGER PRIMARY KEY, entry TEXT NOT NULL);
    CREATE TABLE tasks (name TEXT PRIMARY KEY, view TEXT NOT NULL);
    PRAGMA user_version = {VERSION};
"""


class _HeldQueue(BaseModel):
    """What a text in the file must hold at least."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Params(_HeldQueue):
    params: dict[str, Any]


class _Content(_HeldQueue):
    """Of a submission."""

    adapter: dict[str, Any] = {}


class _Trial(_Content):
    trial: _Params


class _Proposal(_HeldQueue):
    task: str
    trial: _Trial | None


class _QueueEntry(_HeldQueue):
    taken: int
    proposals: list[_Proposal] = []


class _Memory(_HeldQueue):
    limit_bytes: int
    base_bytes: int
    reserved_bytes: int
    predicted_bytes: int
    peak_bytes: int


class _QueueView(_HeldQueue):
    """Of a task, or, with `memory`, of the run."""

    state: str | None = None
    states_bytes: FiniteFloat | None = None
    batch_bytes: FiniteFloat | None = None
    memory: _Memory | None = None


@dataclass(frozen=True)
class Request:
    """A user's request.

    Attributes:
        number: grows from request to request.
        content: of a submission, the task's resolved config.
    """

    number: int
    kind: RequestType
    task: str
    content: dict[str, Any]


class TaskQueue:
    """A run's ``queue.sqlite``; made if it is missing.

    Raises RunError if the file cannot be opened or made, or is of another version of mlora.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = -1
        self._locks = is_running(path.with_name("metrics.jsonl")) is not None
        if path.is_symlink():
            raise RunError(f"{path}: is a link; put the file itself there")
        if path.exists() and not path.is_file():
            raise RunError(f"{path}: is a pipe, a device or a folder; move it away")
        with self._told():
            locks = "" if self._locks else "?vfs=unix-dotfile"  # takes a folder queue.sqlite.lock for a lock
            address = f"{path.absolute().as_uri()}{locks}"
            self._connection = sqlite3.connect(address, timeout=_PATIENCE, isolation_level=None, uri=True)
            with ExitStack() as unless_open:
                unless_open.callback(self._connection.close)
                self._connection.execute("PRAGMA synchronous = FULL")
                self._make()
                unless_open.pop_all()

    def _make(self) -> None:
        found = self._version()
        if found == 0:
            with self.alone():
                if self._version() == 0:  # another process may have made it meanwhile
                    for statement in _TABLES.split(";"):
                        self._connection.execute(statement)
                found = self._version()
        if found != VERSION:
            raise RunError(
                f"{self._path}: was written by another version of mlora; use that one, or train anew with "
                "`mlora train RUN.yaml --overwrite`"
            )

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            more = _ADVICE.get(code, "")
            if code == sqlite3.SQLITE_BUSY and not self._locks:
                more += f"; if none is, a killed process has left {self._path}.lock: remove that folder"
            raise RunError(f"{self._path}: cannot be used: {error}{more}") from error

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps other processes out; what is written inside is kept together, or not at all on an error."""
        if self._connection.in_transaction:
            yield
            return
        with self._told():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:  # after some errors SQLite has rolled back already
                    self._connection.execute("ROLLBACK")

    def ask(self, kind: RequestType, task: str, content: Mapping[str, Any] | None = None) -> int:
        """Adds a request and returns its number; the request is durable then."""
        with self.alone():
            cursor = self._connection.execute(
                "INSERT INTO requests (kind, task, content, at) VALUES (?, ?, ?, ?)",
                (kind, task, "", time.time()),
            )
            number = cursor.lastrowid
            assert number is not None
            text = _text(content or {}, number, kind, task)
            self._connection.execute("UPDATE requests SET content = ? WHERE number = ?", (text, number))
        return number

    def changed(self) -> bool:
        """Whether another process may have asked for something since the last call; takes microseconds."""
        with self._told():
            version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        before, self._seen = self._seen, version
        return version != before

    def requests(self, after: int = 0) -> list[Request]:
        """Returns the requests with numbers above `after`, in their order."""
        with self._told():
            rows = self._connection.execute(
                "SELECT number, kind, task, content FROM requests WHERE number > ? ORDER BY number", (after,)
            ).fetchall()
        return [
            Request(number, kind, task, self._read(content, _Content, number, kind, task))
            for number, kind, task, content in rows
        ]

    def write_entry(self, iteration: int, entry: Mapping[str, Any]) -> None:
        """Writes down what was decided after `iteration` iterations; the entry is durable then."""
        with self.alone():
            values = (iteration, _text(entry, iteration))
            self._connection.execute("INSERT OR REPLACE INTO journal VALUES (?, ?)", values)

    def entries(self, after: int = -1) -> dict[int, dict[str, Any]]:
        """Returns what was decided after iteration `after`, by iteration, in their order."""
        with self._told():
            rows = self._connection.execute(
                "SELECT iteration, entry FROM journal WHERE iteration > ? ORDER BY iteration", (after,)
            ).fetchall()
        return {iteration: self._read(entry, _QueueEntry, iteration) for iteration, entry in rows}

    def taken(self) -> int:
        """Returns the number of the last request that the run has taken; 0 before the first."""
        with self._told():
            query = "SELECT iteration, entry FROM journal ORDER BY iteration DESC LIMIT 1"
            row = self._connection.execute(query).fetchone()
        return int(self._read(row[1], _QueueEntry, row[0])["taken"]) if row else 0

    def taken_by(self, iteration: int) -> int:
        """Returns the number of the last request that was taken up to this iteration; 0 before the first."""
        return max((entry["taken"] for at, entry in self.entries().items() if at <= iteration), default=0)

    def forget_entries(self, after: int = -1) -> None:
        """Forgets what was decided after iteration `after`, for a run that will decide anew."""
        with self.alone():
            self._connection.execute("DELETE FROM journal WHERE iteration > ?", (after,))

    def show(self, views: Mapping[str, Mapping[str, Any]], run: Mapping[str, Any] | None = None) -> None:
        """Publishes what `mlora status` shows: plain values of all tasks by name, and of the whole run."""
        with self.alone():
            self._connection.execute("DELETE FROM tasks")
            rows = [(name, _text(view, name)) for name, view in [*views.items(), (_RUN, run or {})]]
            self._connection.executemany("INSERT INTO tasks VALUES (?, ?)", rows)

    def views(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Returns what was published last: by task, in its order, and of the whole run."""
        with self._told():
            rows = self._connection.execute("SELECT name, view FROM tasks ORDER BY rowid").fetchall()
        views = {name: self._read(view, _QueueView, name) for name, view in rows}
        run = views.pop(_RUN, {})
        return views, run

    def check(self) -> None:
        """Raises RunError if SQLite finds that the file is damaged."""
        with self._told():
            (found,) = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise RunError(f"{self._path}: is damaged: {first_line(found)}{_RESTORE}")

    def _read(self, text: str, kind: type[_HeldQueue], *keys: int | str) -> dict[str, Any]:
        """Returns the object in a row's text if it is as `_text` made it; older rows have no checksum."""
        try:
            body, _, checksum = text.partition("\n")
            found = kind.model_validate(json.loads(body)).model_dump(exclude_unset=True)
            if checksum in ("", _checksum(body, *keys)):
                return found
            fault = f"{text[:40]!r} is not what a run wrote"
        except ValidationError as error:
            fault = first_fault(error)
        except (TypeError, ValueError, AttributeError, RecursionError):
            fault = f"{text[:40]!r} is not JSON" if isinstance(text, str) else "a row holds no text"
        raise RunError(f"{self._path}: is damaged: {fault}{_RESTORE}")

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def __enter__(self) -> TaskQueue:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the file."""
        self.close()


def _text(values: Mapping[str, Any], *keys: int | str) -> str:
    """Returns the text of a row: its values as JSON, and a second line with a checksum of text and keys."""
    text = json.dumps(values)
    return f"{text}\n{_checksum(text, *keys)}"


def _checksum(*parts: int | str) -> str:
    return f"{zlib.crc32(repr(parts).encode()):08x}"


def has_news(path: Path) -> bool:
    """Whether a run has requests that it has not taken; its queue at `path` may be missing."""
    if not path.is_file():
        return False
    with TaskQueue(path) as queue:
        return bool(queue.requests(after=queue.taken()))
