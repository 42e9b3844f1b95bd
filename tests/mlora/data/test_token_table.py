"""Samples of every class go into a table and come out as they were; large files become tables once."""

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlora.data import token_cache
from mlora.data.dataset import Dataset, load_dataset
from mlora.data.preference import Judged, Pair
from mlora.data.record import AnswerSample, LabelledSample, Prompt, Sample
from mlora.data.source import Source
from mlora.data.token_cache import table_key
from mlora.data.token_table import Samples, record_batches, write_table
from mlora.errors import RunError
from tiny_run import save_tokenizer, write_jsonl
from transformers import CTRLTokenizer

CHOSEN, REJECTED = Sample((1, 2, 9), (-100, 2, 9)), Sample((1, 3), (-100, 3))
KINDS: dict[str, list[Any]] = {
    "sequences": [Sample((1, 2, 3), (-100, 2, 3)), Sample((4,), (4,)), Sample((), ())],
    "other labels": [Sample((1, 2, 3), (-100, 7, 3)), Sample((4, 0), (-100, -100)), Sample((0,), (0,))],
    "one label": [LabelledSample.of_sequence((1, 2, 3), 2), LabelledSample.of_sequence((4,), 4)],
    "values": [LabelledSample.of_sequence((1, 2), 0, 0.1, -1e-9), LabelledSample.of_sequence((3,), 0, 2.0)],
    "labels of tokens": [LabelledSample((1, 2, 3), (2, -100, 1)), LabelledSample((4,), (0,))],
    "answers": [AnswerSample.of_answer((1, 2, 3), 1, 2), AnswerSample.of_answer((1, 2, 3), 1, 2).cut(2)],
    "pairs": [Pair(CHOSEN, REJECTED), Pair(REJECTED, Sample((1, 2), (2, 7)))],
    "judged": [Judged((1, 2), (3,), True, 5), Judged((1,), (3, 4, 5, 6), False), Judged((), (1,), True, 1)],
}


def rows_of(samples: list[Any]) -> list[tuple[Any, Prompt | None]]:
    return [(sample, None) for sample in samples]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 10_000])
def test_samples_come_out_as_they_were(
    kind: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlora.data.token_table._ROWS", batch)
    wanted = KINDS[kind]
    path = tmp_path / "t.arrow"
    assert write_table(record_batches(rows_of(wanted)), str(path)) == len(wanted)
    for samples in (Samples.of_file(path), Samples.of(rows_of(wanted))):
        found = list(samples)
        assert [repr(one) for one in found] == [repr(one) for one in wanted]
        assert [samples.hollow(row).rows for row in range(len(wanted))] == [one.rows for one in wanted]
        assert samples.by_rows() == sorted(range(len(wanted)), key=lambda row: wanted[row].rows)
        longest = [max(part.rows for part in one.parts) for one in wanted]
        assert longest[samples.longest()] == max(longest)
        with pytest.raises(IndexError):
            samples[len(wanted)]


def test_prompts_stay_with_their_samples() -> None:
    prompts = [Prompt((1, 2), "ü", 3), None, Prompt((), "", 1)]
    samples = Samples.of(zip(KINDS["sequences"], prompts, strict=True))
    assert samples.prompts() == [prompts[0], prompts[2]]
    assert samples.chosen(np.array([2, 1])).prompts() == [prompts[2]]


def test_five_bytes_a_token(tmp_path: Path) -> None:
    """And those of an offset, where prompts are masked."""
    ids = tuple(range(200))
    path = tmp_path / "t.arrow"
    write_table(record_batches(rows_of([Sample(ids, (-100,) * 50 + ids[50:])] * 2000)), str(path))
    assert path.stat().st_size / (200 * 2000) < 5.3


def load(path: Path, cache: Path | None, **options: Any) -> Dataset:
    how: dict[str, Any] = {"max_length": 6, "vocab_size": 300, "cache": cache} | options
    return load_dataset("d", path, how.pop("format", "tokens"), **how)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any size are kept."""
    monkeypatch.setattr(token_cache, "_SMALL", 0)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_jsonl(
        tmp_path / "d.jsonl", [{"input_ids": [n, 1, 2, 3, 4, 5, 6, 7][: 2 + n]} for n in range(7)]
    )


@pytest.mark.usefixtures("small")
def test_a_large_file_is_read_once(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    wanted, first = load(lines, None), load(lines, cache)
    monkeypatch.setattr(Source, "rows", lambda self: (pytest.fail("it is read again") for _ in "1"))
    again = load(lines, cache)
    for found in (first, again):
        assert list(found.samples) == list(wanted.samples)
        assert found.warnings == wanted.warnings != []
        assert found.fingerprint == wanted.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.usefixtures("small")
def test_what_changes_samples_is_another_table(lines: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(lines, cache)
    assert load(lines, cache, max_length=3).samples[6].rows == 3
    lines.write_text(lines.read_text() + '{"input_ids": [8, 9]}\n')
    assert len(load(lines, cache).samples) == 8
    tokenizer = save_tokenizer(tmp_path)
    key = table_key(tokenizer, "a", 1)
    assert key == table_key(save_tokenizer(tmp_path), "a", 1) != table_key(tokenizer, "a", 2)
    tokenizer.chat_template = "{{ messages }}"
    changed = table_key(tokenizer, "a", 1)
    assert changed != key
    tokenizer.add_tokens(["<new>"])
    assert table_key(tokenizer, "a", 1) not in (key, changed)
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.split_special_tokens = True
    assert table_key(tokenizer, "a", 1) != key


def test_all_of_a_tokenizer_without_a_backend_counts(tmp_path: Path) -> None:
    """Its words alone do not: the same words may be merged in another order, or lowered."""
    words = {"<unk>": 0, "a</w>": 1, "b": 2, "ab</w>": 3, "bb</w>": 4, "b</w>": 5, "a": 6}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    keys = set()
    for merges, more in (
        ("a b</w>\nb b</w>", {}),
        ("b b</w>\na b</w>", {}),
        ("b b</w>\na b</w>", {"x": True}),
    ):
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        tokenizer = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), **more)
        tokenizer.save_pretrained(tmp_path / "saved")
        loaded = CTRLTokenizer.from_pretrained(tmp_path / "saved")
        assert table_key(loaded) == table_key(CTRLTokenizer.from_pretrained(tmp_path / "saved"))
        keys.add(table_key(loaded))
    assert len(keys) == 3


@pytest.mark.usefixtures("small")
def test_the_same_bytes_by_other_names(tmp_path: Path) -> None:
    """A name says how CSV and TSV are read."""
    cache = tmp_path / "cache"
    for name in ("d.tsv", "d.csv"):
        (tmp_path / name).write_text("input_ids\tlabels\n[1, 2]\t[1, 2]\n")
    assert len(load(tmp_path / "d.tsv", cache).samples) == 1
    with pytest.raises(RunError, match=r"d\.csv:2: has another number of values"):
        load(tmp_path / "d.csv", cache)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("damage", [b"", b"ARROW1", None])
def test_a_damaged_table_is_made_anew(damage: bytes | None, lines: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    wanted = list(load(lines, cache).samples)
    (path,) = (tmp_path / "cache").glob("*.arrow")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-40] if damage is None else damage)
    assert list(load(lines, cache).samples) == wanted
    assert path.read_bytes() == whole


@pytest.mark.usefixtures("small")
def test_what_fails_leaves_nothing_behind(lines: Path, tmp_path: Path) -> None:
    lines.write_text(lines.read_text() + '{"input_ids": [999]}\n')
    with pytest.raises(RunError, match=r"d\.jsonl:8: token id 999 is outside"):
        load(lines, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    reason = r"(File exists|Not a directory); data_cache may name another folder$"
    with pytest.raises(RunError, match=f"file: cannot keep tokenised data: {reason}"):
        load(write_jsonl(tmp_path / "e.jsonl", [{"input_ids": [1, 2]}]), tmp_path / "file")


@pytest.mark.usefixtures("small")
def test_what_killed_processes_have_left_is_removed(lines: Path, tmp_path: Path) -> None:
    """But not what another process may be writing."""
    (tmp_path / "cache").mkdir()
    for name, age in (("old", 100_000), ("new", 1000)):
        part = tmp_path / "cache" / f"{name}.arrow.1.part"
        part.touch()
        os.utime(part, (time.time() - age,) * 2)
    load(lines, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").glob("*.part")] == ["new.arrow.1.part"]


def _load(path: Path, folder: Path, start: Any) -> None:
    token_cache._SMALL = 0
    start.wait()
    assert len(load(path, folder).samples) == 7


def test_two_processes_may_make_the_same_table(lines: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    workers = [context.Process(target=_load, args=(lines, tmp_path / "cache", start)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".arrow", ".json"]


def test_small_files_are_not_kept(lines: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(lines, cache)
    assert not (tmp_path / "cache").exists()


def test_long_samples_are_written_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlora.data.token_table._TOKENS", 10)
    samples = Samples.of(rows_of([Sample((1,) * 6, (1,) * 6)] * 5))
    assert [len(part.lengths) for part in samples._parts] == [2, 2, 1]
    assert len(list(samples)) == 5


def test_rows_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a table may be larger than memory."""
    monkeypatch.setattr("mlora.data.token_table._ROWS", 10)
    held: Counter[str] = Counter()

    def rows() -> Iterator[tuple[Any, None]]:
        for number in range(100):
            held["made"] += 1
            yield Sample((number,), (number,)), None
            assert held["made"] - held["written"] <= 11

    from mlora.data import token_table

    arrays = token_table._arrays

    def counted(part: Any, columns: Any) -> Any:
        held["written"] += len(part)
        return arrays(part, columns)

    monkeypatch.setattr(token_table, "_arrays", counted)
    assert len(Samples.of(rows())) == 100
