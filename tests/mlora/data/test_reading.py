"""Several processes that share the work give the samples, warnings and errors of one."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from mlora.data import reading
from mlora.data.dataset import Dataset, load_dataset
from mlora.data.formats import Reading
from mlora.data.readers import Row
from mlora.errors import RunError
from tiny_run import save_tokenizer, write_jsonl

ROWS: list[Any] = [{"prompt": f"{n} + 1 = ", "completion": str(n + 1) * (1 + n % 3)} for n in range(25)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of any size are kept, and cut into parts of 4 rows."""
    monkeypatch.setattr("mlora.data.token_cache._SMALL", 0)
    monkeypatch.setattr(reading, "_CHUNK", 4)


def load(path: Path, processes: int) -> Dataset:
    cache = path.parent / f"cache-{processes}"
    how: dict[str, Any] = {"max_length": 12, "vocab_size": 300, "cache": cache, "processes": processes}
    how |= {"tokenizer": save_tokenizer(path.parent), "ends": (0,)}
    return load_dataset("d", path, "prompt_completion", **how)


def test_samples_and_warnings_are_those_of_one_process(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    one, two = load(path, 1), load(path, 2)
    assert list(two.samples) == list(one.samples)
    assert two.prompts == one.prompts != []
    assert two.warnings == one.warnings != []
    assert two.fingerprint == one.fingerprint
    names = [sorted(p.name for p in (tmp_path / f"cache-{count}").iterdir()) for count in (1, 2)]
    assert names[0] == names[1]  # the key does not know how many there were
    assert active_children() == []


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_wrong_row_is_told(processes: int, tmp_path: Path) -> None:
    changed = {9: {"prompt": 1}, 11: [], 13: {}}  # the second is found while rows are read
    path = write_jsonl(tmp_path / "d.jsonl", [changed.get(place, row) for place, row in enumerate(ROWS)])
    with pytest.raises(RunError, match=r"d\.jsonl:10: 'prompt' must be text"):
        load(path, processes)
    assert active_children() == []


def test_what_is_no_row_counts_after_those_before_it() -> None:
    def rows() -> Iterator[Row]:
        yield from [("d:1", {}), ("d:2", {}), ("d:3", {}), ("d:4", {}), ("d:5", {})]
        raise RunError("d:6 is no row")

    whole, last = reading._chunks(rows())
    assert (len(whole.rows), whole.fault) == (4, None)
    assert (len(last.rows), str(last.fault)) == (1, "d:6 is no row")


def test_a_process_that_is_killed_is_told(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    how = Reading(
        path="d.jsonl", format="prompt_completion", max_length=12, vocab_size=300, tokenizer=tokenizer
    )

    def rows() -> Iterator[Row]:
        yield from [(f"d.jsonl:{place}", row) for place, row in enumerate(ROWS[:8])]
        os.kill(active_children()[0].pid or 0, signal.SIGKILL)
        while active_children():  # what is left ends, too
            time.sleep(0.01)
        yield "d.jsonl:9", ROWS[8]

    told = r"d\.jsonl: a process .* ended\. .* dataset_num_proc, which is 2\. .*__main__"
    with pytest.raises(RunError, match=told):
        list(reading.read_batches(how, rows(), Counter(), 2))
