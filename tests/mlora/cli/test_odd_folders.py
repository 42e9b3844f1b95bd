"""A run's folder whose files were changed in any way: one line or a result, never a traceback."""

import json
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Run, only_line

DEEP = "[" * 100_000
VALUES = [None, True, -1, 1e300, "x", "\x1b[2J", [], {}, [None], {"": 0}, 10**400, [[]], {"name": ["a"]}]
KEYS = {
    "requests": ("content", ["adapter"]),
    "journal": ("entry", ["proposals", "taken"]),
    "tasks": ("view", ["state", "states_bytes", "memory"]),
}
"""Of each table of a queue: its column of JSON, and the keys that commands read."""
GROUPS = 25
EACH = 20


def places(value: Any, depth: int = 9) -> Iterator[tuple[Any, Any]]:
    """Yields each container of a tree with each of its keys, down to a depth."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys if depth else ():
        yield value, key
        yield from places(value[key], depth - 1)


def change_value(text: str, random: random.Random, *, as_yaml: bool) -> str:
    """Changes the type of a value, drops it, or takes it into a list or a mapping."""
    tree = yaml.safe_load(text) if as_yaml else json.loads(text)
    where, key = random.choice(list(places(tree, random.choice([1, 3, 9]))))
    if random.random() < 0.25:
        del where[key]
    else:
        where[key] = random.choice([*VALUES, [where[key]], {"x": where[key]}])
    return yaml.safe_dump(tree, allow_unicode=False) if as_yaml else json.dumps(tree)


def mutate(path: Path, random: random.Random) -> None:
    content = path.read_bytes()
    kind = random.choice(["value", "value", "value", "byte", "cut", "not UTF-8", "deep", "empty"])
    if kind == "value" and path.suffix in (".json", ".jsonl", ".yaml"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        place = random.randrange(len(lines))
        lines[place] = change_value(lines[place], random, as_yaml=path.suffix == ".yaml")
        content = ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")
    elif kind in ("byte", "value"):
        place = random.randrange(len(content))
        content = content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
    elif kind == "cut":
        content = content[: random.randrange(len(content))]
    elif kind == "not UTF-8":
        content = b"\xff\xfe" + content
    else:
        content = (DEEP if random.random() < 0.5 else '{"a":' * 100_000).encode() if kind == "deep" else b""
    path.write_bytes(content)


@pytest.mark.parametrize("table", KEYS)
def test_odd_texts_in_a_queue(run: Run, trained: Path, tmp_path: Path, table: str) -> None:
    column, keys = KEYS[table]
    folder = shutil.copytree(trained, tmp_path / "run")
    for number, value in enumerate([None, [], *({key: one} for key in keys for one in VALUES), DEEP]):
        text = value if value is DEEP else json.dumps(value)
        with closing(sqlite3.connect(folder / "queue.sqlite")) as queue, queue:
            queue.execute("INSERT INTO requests (kind, task, content, at) VALUES ('submit', 'x', '{}', 0)")
            queue.execute("INSERT OR IGNORE INTO journal VALUES (0, '{}')")
            queue.execute("INSERT OR IGNORE INTO tasks VALUES ('', '{}')")
            queue.execute(f"UPDATE {table} SET {column} = ?", (text,))
        for command in ("status", "report") if number % 10 == 0 else ("status",):
            result = run(command, folder)
            assert result.exit_code == (1 if "error: " in result.stderr else 0), (value, result.stderr)


@pytest.fixture(scope="module")
def files(trained: Path) -> list[Path]:
    found = sorted(path.relative_to(trained) for path in trained.rglob("*") if path.is_file())
    return [path for path in found if path.suffix not in (".png", ".md")]


@pytest.mark.parametrize(
    "group", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, GROUPS))]
)
def test_no_change_of_a_file_ends_in_a_traceback(
    run: Run, trained: Path, files: list[Path], tmp_path: Path, group: int
) -> None:
    """Calls raise what no command expects."""
    for number in range(group * EACH, (group + 1) * EACH):
        chance = random.Random(number)
        folder = shutil.copytree(trained, tmp_path / "run", dirs_exist_ok=True)
        weights = [8 if path.parent == Path() else 1 for path in files]
        path = chance.choices(files, weights)[0]
        mutate(folder / path, chance)
        # an export reads an adapter's folder, and of the others what `status` does
        exports = (
            [["export", "first", "--output", tmp_path / "out"]] if number % 4 == 0 or path.parts[1:] else []
        )
        for arguments in (["status"], ["report"], *exports):
            result = run(arguments[0], folder, *arguments[1:])
            assert result.exit_code == (1 if "error: " in result.stderr else 0), (number, result.stderr)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(folder)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_files_that_are_none(run: Run, trained: Path, files: list[Path], tmp_path: Path, kind: str) -> None:
    """A pipe would be waited for, and a device be read until memory ends. Calls raise the unexpected."""
    folder = shutil.copytree(trained, tmp_path / "run")
    for path in files:
        (folder / path).rename(tmp_path / "kept")
        os.mkfifo(folder / path) if kind == "pipe" else (folder / path).symlink_to("/dev/zero")
        out = tmp_path / "out"
        for arguments in (["status"], ["report"], ["export", "first", "--output", out], ["resume"]):
            result = run(arguments[0], folder, *arguments[1:])
            assert result.exit_code == (1 if "error: " in result.stderr else 0), (path, result.stderr)
        shutil.rmtree(out, ignore_errors=True)
        (tmp_path / "kept").replace(folder / path)


def test_an_export_copies_no_links(run: Run, trained: Path, tmp_path: Path) -> None:
    """A foreign run must not put a private file into what its reader publishes."""
    folder = shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "private").write_text("{}")
    (folder / "adapters" / "first" / "labels.json").symlink_to(tmp_path / "private")
    result = run("export", folder, "first", "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert "labels.json" in result.stderr or "is a link" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("r", None, "r: expected an integer >= 1, got None"),
        ("r", "8", "r: expected an integer >= 1, got '8'"),
        ("lora_alpha", float("nan"), "lora_alpha: expected a finite number, got nan"),
        ("target_modules", 5, "target_modules: expected a pattern or names, got 5"),
        ("peft_type", "EVIL", "has an adapter of type 'EVIL', expected 'LORA'"),
    ],
)
@pytest.mark.parametrize("command", ["export", "merge"])
def test_an_adapters_config_with_wrong_values_is_named(
    run: Run, trained: Path, tmp_path: Path, command: str, field: str, value: Any, expected: str
) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    config = folder / "adapters" / "first" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    line = only_line(run(command, folder, "first", "--output", tmp_path / "out"))
    assert line.startswith(f"error: {config.parent}")
    assert line.endswith(expected)
    assert not (tmp_path / "out").exists()
