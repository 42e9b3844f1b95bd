"""Where rows come from: columns, several files with weights, samples that are held out, the hub."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from mlora.config.config_file import resolve_config
from mlora.data.dataset import Dataset, held_out, joined, load_dataset
from mlora.data.source import Source
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.run.run import train
from mlora.tasks.task import Task, TaskBuilder
from tiny_run import run_data, write_jsonl


def load(path: Path) -> Dataset:
    return load_dataset("d", path, "tokens", max_length=8, vocab_size=300)


def ids_of(data: Dataset) -> list[int]:
    """The first token of each sample."""
    return [sample.input_ids[0] for sample in data.samples]


def counted(folder: Path, name: str, first: int, count: int) -> Path:
    return write_jsonl(folder / name, [{"input_ids": [n, 1]} for n in range(first, first + count)])


def test_columns_get_the_names_of_fields(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [{"q": "1", "prompt": "old", "a": "2", "more": 3}, {"q": "4"}])
    rows = Source(str(path), columns=(("prompt", "q"), ("completion", "a"))).rows()
    assert next(rows) == (f"{path}:1", {"prompt": "1", "completion": "2", "more": 3})
    with pytest.raises(RunError, match=r"d\.jsonl:2: columns\.completion: 'a' is missing; the row has 'q'$"):
        next(rows)


def test_weights_say_how_often_samples_are_there(tmp_path: Path) -> None:
    parts = [load(counted(tmp_path, "a.jsonl", 0, 4)), load(counted(tmp_path, "b.jsonl", 10, 4))]
    assert ids_of(joined(parts, [1, 1], 0)) == [0, 1, 2, 3, 10, 11, 12, 13]
    found = ids_of(joined(parts, [2.5, 0.25], 7))
    assert found[:8] == [0, 1, 2, 3] * 2
    assert len(found) == 11
    assert sorted(set(found[8:10])) == found[8:10]
    assert set(found[8:10]) < {0, 1, 2, 3}
    assert found[10] in (10, 11, 12, 13)
    assert ids_of(joined(parts, [2.5, 0.25], 7)) == found
    several = {tuple(ids_of(joined(parts, [0.5, 0.5], seed))) for seed in range(20)}
    assert len(several) > 1
    assert joined(parts, [1, 1], 0).fingerprint != joined(parts, [1, 2], 0).fingerprint


def test_samples_are_held_out(tmp_path: Path) -> None:
    data = load(counted(tmp_path, "a.jsonl", 0, 10))
    for share, count in ((0.25, 3), (4, 4), (0.01, 1)):
        rest, held = (ids_of(part) for part in held_out(data, share, 3))
        assert len(held) == count
        assert sorted(rest + held) == list(range(10))
        assert rest == sorted(rest)
        assert held == sorted(held)
    with pytest.raises(RunError, match="validation_split: holds out 10 of 10 samples, and none is left"):
        held_out(data, 10, 3)


def test_views_keep_what_the_table_knows(tmp_path: Path) -> None:
    lengths = [3, 7, 2, 5]
    path = write_jsonl(tmp_path / "d.jsonl", [{"input_ids": [1] * length} for length in lengths])
    samples = load(path).samples.chosen(np.array([3, 0, 3, 1]))
    assert [sample.rows for sample in samples] == [5, 3, 5, 7]
    assert samples.by_rows() == [1, 0, 2, 3]
    assert samples.by_rows(longest_first=True) == [3, 0, 2, 1]
    assert samples.longest() == 3
    assert samples[-1].rows == 7
    assert [sample.rows for sample in samples[1:3]] == [3, 5]


def task_of(data: dict[str, Any], base: Path, folder: Path) -> Task:
    config = resolve_config(data, folder=folder)
    return TaskBuilder(config, BaseInfo(str(base), str(base))).build(config.adapters[0])


def test_a_run_of_several_files_with_a_held_out_part(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path, data_cache=str(tmp_path / "cache"))
    counted(tmp_path, "a.jsonl", 0, 12)
    (tmp_path / "b.csv").write_text("ids\n" + "".join(f'"[{n}, 1]"\n' for n in range(100, 108)))
    files = ["a.jsonl", {"path": "b.csv", "weight": 2}]
    rows = [{"ids": [n, 1]} for n in range(12)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    data["datasets"] = [
        {
            "name": "mix",
            "path": files,
            "format": "tokens",
            "columns": {"input_ids": "ids"},
            "validation_split": 0.25,
        }
    ]
    data["adapters"] = [data["adapters"][0] | {"dataset": "mix", "eval_dataset": "mix"}]
    task = task_of(data, tiny_base, tmp_path)
    assert task.eval_data is not None
    trained, held = ids_of(task.data), ids_of(task.eval_data)
    assert (len(trained), len(held)) == (9 + 2 * 6, 3 + 2)
    assert set(trained) | set(held) == {*range(12), *range(100, 108)}
    assert not set(trained) & set(held)
    assert ids_of(task_of(data, tiny_base, tmp_path).data) == trained
    assert train(resolve_config(data, folder=tmp_path)).status == "finished"


def test_a_dataset_of_the_hub(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, subset: str | None, **how: Any) -> datasets.Dataset:
        asked.append((path, subset, how))
        return datasets.Dataset.from_list([{"input_ids": [n, 1]} for n in range(5)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = run_data(tiny_base, tmp_path, data_cache=str(tmp_path / "cache"))
    hub = {"path": "owner/name", "split": "train[:5]", "subset": "s", "revision": "v1"}
    data["datasets"] = [{"name": "hub", "format": "tokens", **hub}]
    data["adapters"] = [data["adapters"][0] | {"dataset": "hub", "eval_dataset": None, "eval_steps": None}]
    assert ids_of(task_of(data, tiny_base, tmp_path).data) == [0, 1, 2, 3, 4]
    assert set(map(str, asked)) == {str(("owner/name", "s", {"split": "train[:5]", "revision": "v1"}))}


def test_what_is_nowhere(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **how: Any) -> None:
        raise FileNotFoundError("Dataset 'owner/name' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(RunError, match=r"^owner/name: no such file or folder, and as a dataset of"):
        list(Source("owner/name").rows())
