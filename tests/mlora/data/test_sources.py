"""Where rows come from: columns, several files with weights, samples that are held out, the hub."""

import io
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlora.config.config_file import resolve_config
from mlora.config.run_config import RunConfig
from mlora.data.dataset import Dataset, held_out, joined, load_dataset
from mlora.data.source import Source
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.run.reporter import PlainLines
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
    with pytest.raises(RunError, match=r"a\.jsonl and 1 more: weight leaves none of 8 samples$"):
        joined(parts, [0.1, 0.1], 0)


def test_samples_are_held_out(tmp_path: Path) -> None:
    data = load(counted(tmp_path, "a.jsonl", 0, 10))
    for share, count in ((0.25, 3), (4, 4), (0.01, 1)):
        rest, held = (ids_of(part) for part in held_out([data], share, 3)[0])
        assert len(held) == count
        assert sorted(rest + held) == list(range(10))
        assert rest == sorted(rest)
        assert held == sorted(held)
    with pytest.raises(RunError, match=r"a\.jsonl: validation_split holds out 10 of 10 samples, and none is"):
        held_out([data], 10, 3)


def test_a_number_of_held_out_samples_is_that_of_all_files(tmp_path: Path) -> None:
    parts = [load(counted(tmp_path, "a.jsonl", 0, 10)), load(counted(tmp_path, "b.jsonl", 10, 5))]
    found = held_out(parts, 6, 3)
    rest, held = ([ids_of(pair[side]) for pair in found] for side in (0, 1))
    assert len(held[0] + held[1]) == 6
    assert sorted(rest[0] + held[0]) == list(range(10))
    assert sorted(rest[1] + held[1]) == list(range(10, 15))
    assert sum(len(pair[0].samples) for pair in held_out(parts, 14, 3)) == 1


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = counted(tmp_path, "a.jsonl", 0, 3)
    read = Source.rows

    def changed(self: Source) -> Any:
        yield from read(self)
        path.write_text(path.read_text() + "more")

    monkeypatch.setattr(Source, "rows", changed)
    with pytest.raises(RunError, match=r"a\.jsonl: the dataset 'd' changed while it was read; try again"):
        load(path)


def test_datasets_of_one_name_are_told_apart(tiny_base: Path, tmp_path: Path) -> None:
    """Tasks that are submitted bring datasets of their own."""
    data = run_data(tiny_base, tmp_path)
    counted(tmp_path, "a.jsonl", 0, 4)
    own = {"name": "mix", "path": "a.jsonl", "format": "tokens"}
    data["datasets"] = [own]
    data["adapters"] = [data["adapters"][0] | {"dataset": "mix", "eval_dataset": None, "eval_steps": None}]
    twice = data | {"datasets": [own | {"path": [{"path": "a.jsonl", "weight": 2}]}]}
    one, two = (resolve_config(each, folder=tmp_path) for each in (data, twice))
    builder = TaskBuilder(one, BaseInfo(str(tiny_base), str(tiny_base)))
    assert ids_of(builder.build(one.adapters[0]).data) == [0, 1, 2, 3]
    assert ids_of(builder.build(two.adapters[0], two.datasets).data) == [0, 1, 2, 3] * 2


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
    assert len(held) == 5
    assert len(trained) == 15 + len([n for n in set(trained) if n >= 100])
    assert set(trained) | set(held) == {*range(12), *range(100, 108)}
    assert not set(trained) & set(held)
    assert ids_of(task_of(data, tiny_base, tmp_path).data) == trained
    data["datasets"].append(
        {"name": "few", "path": "a.jsonl", "format": "tokens", "columns": {"input_ids": "ids"}}
    )
    few = task_of(
        data | {"adapters": [data["adapters"][0] | {"dataset": "few", "eval_dataset": "few"}]},
        tiny_base,
        tmp_path,
    )
    told = io.StringIO()
    PlainLines(told).start([task, few])
    lines = told.getvalue().splitlines()
    assert lines[0] == f"first: {len(trained)} samples, 5 held out, {task.total_steps} steps"
    assert lines[1] == f"first: 12 samples, {few.total_steps} steps"
    assert train(resolve_config(data, folder=tmp_path)).status == "finished"


def rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": [n, 1]} for n in range(count)]


def first_ids(source: Source) -> list[int]:
    return [fields["input_ids"][0] for _, fields in source.rows()]


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    datasets.Dataset.from_list(rows(3)).save_to_disk(one)
    splits = {"train": datasets.Dataset.from_list(rows(2)), "held": datasets.Dataset.from_list(rows(1))}
    datasets.DatasetDict(splits).save_to_disk(two)
    assert first_ids(Source(one)) == [0, 1, 2]
    assert first_ids(Source(two)) == [0, 1]
    assert first_ids(Source(two, split="held")) == [0]
    for source, message in (
        (Source(two, split="test"), "two: has no split 'test'; it has train, held"),
        (Source(one, split="train"), "one: holds one split, without a name; remove split"),
        (Source(one, revision="v1"), "one: revision is for datasets of the hub; remove it"),
    ):
        with pytest.raises(RunError, match=f"{message}$"):
            first_ids(source)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` prepares is kept in a folder of the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "prepared"))


@pytest.mark.usefixtures("own_cache")
def test_bars_are_drawn_where_those_of_transformers_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line draws none into files."""
    off: list[bool] = []
    monkeypatch.setattr(datasets, "disable_progress_bars", lambda: off.append(True))
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", rows(2))
    for drawn in (True, False):
        monkeypatch.setattr("transformers.utils.logging.is_progress_bar_enabled", lambda drawn=drawn: drawn)
        assert first_ids(Source(str(tmp_path / "files"))) == [0, 1]
        assert off == [True] * (not drawn)


@pytest.mark.usefixtures("own_cache")
def test_a_folder_of_data_files(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, count in (("train-0.jsonl", 3), ("train-1.jsonl", 2), ("test.jsonl", 1)):
        write_jsonl(folder / name, rows(count))
    assert first_ids(Source(str(folder))) == [0, 1, 2, 0, 1]
    assert first_ids(Source(str(folder), split="test")) == [0]
    assert first_ids(Source(str(folder), streaming=True, limit=4)) == [0, 1, 2, 0]
    (folder / "train-1.jsonl").write_text('{"input_ids": [1]}\n{bad\n')
    for streaming in (False, True):
        with pytest.raises(RunError, match=r"files: as a folder of data files it cannot be read: .*JSON"):
            first_ids(Source(str(folder), streaming=streaming, limit=9))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="empty: as a folder of data files it cannot be read: "):
        first_ids(Source(str(tmp_path / "empty")))
    source = Source(str(folder), streaming=True, limit=4)
    before = source.fingerprint()
    write_jsonl(folder / "test.jsonl", rows(2))  # in place: the folder itself has its time as before
    assert source.fingerprint() != before
    with pytest.raises(RunError, match=r"test\.jsonl: split is for datasets of folders and of the hub"):
        first_ids(Source(str(folder / "test.jsonl"), split="train"))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.jsonl": '{"text": "a"}', "b.jsonl": '{"text": "b", "more": 1}'},
            r"Couldn't cast text: string more: int64 to|new columns \(\{'more'\}\)",
        ),
        (
            {"a.jsonl": '{"text": "a"}', "b.jsonl": '{"text": ["b"]}'},
            "Couldn't cast array of type list<item: string> to string; if its files have unlike columns",
        ),
        (
            {"a.csv": "text,label\na,1\n", "b.csv": "text,label\na,x\n"},
            "label: int64 vs text: large_string|'x' as a scalar of type int64",
        ),
    ],
    ids=["another column", "another type", "CSV"],
)
def test_a_folder_of_unlike_files(files: dict[str, str], message: str, tmp_path: Path) -> None:
    """All that `datasets` says, in one line; it differs by version. A list of the same files is read."""
    (folder := tmp_path / "files").mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    with pytest.raises(RunError) as error:
        list(Source(str(folder)).rows())
    assert re.search(message, str(error.value))
    assert "list them in `path`" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert all(len(list(Source(str(folder / name)).rows())) == 1 for name in files)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_with_dates_that_python_cannot_hold(streaming: bool, tmp_path: Path) -> None:
    (folder := tmp_path / "files").mkdir()
    dates = pa.array([0, 9_400_000_000_000], pa.timestamp("s"))  # 1970 and 300000
    pq.write_table(pa.table({"text": ["x", "y"], "date": dates}), folder / "d.parquet")
    how: Any = {"streaming": streaming, "limit": 9}
    found = [fields for _, fields in Source(str(folder), **how).rows()]
    assert [fields["text"] for fields in found] == ["x", "y"]
    with pytest.raises(RunError, match=r"files, row \d: ('date'|a value) cannot be read: .+"):
        list(Source(str(folder), columns=(("text", "date"),), **how).rows())


def hub_run(base: Path, folder: Path, **dataset: Any) -> dict[str, Any]:
    data = run_data(base, folder, data_cache=str(folder / "cache"))
    data["datasets"] = [{"name": "hub", "path": "owner/name", "format": "tokens", **dataset}]
    data["adapters"] = [data["adapters"][0] | {"dataset": "hub", "eval_dataset": None, "eval_steps": None}]
    return data


@pytest.mark.usefixtures("own_cache")
def test_a_dataset_of_the_hub(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` finds ``owner/name`` in the working directory, which is not the config's folder."""
    hub = tmp_path / "hub" / "owner" / "name"
    hub.mkdir(parents=True)
    datasets.Dataset.from_list(rows(9)).to_parquet(hub / "train.parquet")
    monkeypatch.chdir(tmp_path / "hub")
    assert ids_of(task_of(hub_run(tiny_base, tmp_path), tiny_base, tmp_path).data) == [*range(9)]
    data = hub_run(tiny_base, tmp_path, split="train[2:5]")
    task = task_of(data, tiny_base, tmp_path)
    assert ids_of(task.data) == [2, 3, 4]
    assert task_of(data, tiny_base, tmp_path).data.fingerprint == task.data.fingerprint
    first = task_of(hub_run(tiny_base, tmp_path, streaming=True, max_samples=4), tiny_base, tmp_path).data
    assert ids_of(first) == [0, 1, 2, 3]
    again = task_of(hub_run(tiny_base, tmp_path, streaming=True, max_samples=4), tiny_base, tmp_path)
    assert again.data.fingerprint == first.fingerprint
    other = task_of(hub_run(tiny_base, tmp_path, streaming=True, max_samples=3), tiny_base, tmp_path)
    assert other.data.fingerprint != first.fingerprint


def test_what_the_hub_is_asked(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, subset: str | None, **how: Any) -> datasets.Dataset:
        asked.append((path, subset, how))
        return datasets.Dataset.from_list(rows(5))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = hub_run(tiny_base, tmp_path, split="held", subset="s", revision="v1")
    assert ids_of(task_of(data, tiny_base, tmp_path).data) == [0, 1, 2, 3, 4]
    how = {"split": "held", "revision": "v1", "streaming": False}
    assert asked == [("owner/name", "s", how)] * len(asked) != []


def test_what_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **how: Any) -> None:
        raise FileNotFoundError("Dataset 'owner/name' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = "^owner/name: no such file or folder, and on the hub it cannot be read: Dataset 'owner/name'"
    with pytest.raises(RunError, match=message):
        list(Source("owner/name").rows())


def test_a_file_is_read_up_to_the_last_sample(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", rows(5))
    path.write_text(path.read_text() + "no JSON")
    limited, streamed = (Source(str(path), limit=5, streaming=streaming) for streaming in (False, True))
    assert first_ids(limited) == first_ids(streamed) == [0, 1, 2, 3, 4]
    with pytest.raises(RunError, match=r"d\.jsonl:6: is not JSON"):
        first_ids(Source(str(path), limit=6))
    assert limited.fingerprint() != Source(str(path)).fingerprint()
    before = streamed.fingerprint()
    path.write_text(path.read_text() + "more")
    assert streamed.fingerprint() != before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"streaming": True},
            "datasets.mix.streaming: needs max_samples: how many rows to read of each file",
        ),
        ({"validation_split": 2.5}, "validation_split: 2.5 is neither a share below 1 nor a whole number"),
        ({"path": "https://x/y.jsonl"}, "path: https://x/y.jsonl is a web address"),
        ({"path": []}, "path"),
        ({"path": [{"path": "a.jsonl", "wieght": 2}]}, "did you mean 'weight'"),
        ({"max_samples": 0}, "max_samples"),
        (
            {"columns": {"labels": "y", "input_id": "x"}},
            "columns.input_id: the format tokens has no such field; did you mean 'input_ids'?",
        ),
        (
            {"columns": {"text": "x"}},
            "columns.text: the format tokens has no such field; its fields: input_ids, labels",
        ),
    ],
)
def test_keys_that_are_refused(keys: dict[str, Any], message: str, tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["datasets"] = [{"name": "mix", "path": "a.jsonl", "format": "tokens"} | keys]
    with pytest.raises(RunError, match=re.escape(message)) as error:
        resolve_config(data, folder=tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_paths_are_written_as_briefly_as_they_were(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    here = str(tmp_path)
    for given, written in (
        ("a.jsonl", f"{here}/a.jsonl"),
        (["a.jsonl"], f"{here}/a.jsonl"),
        (["a.jsonl", {"path": "b", "weight": 2}], [f"{here}/a.jsonl", {"path": f"{here}/b", "weight": 2.0}]),
        ([{"path": "owner/name", "weight": 0.5}], [{"path": "owner/name", "weight": 0.5}]),
    ):
        data["datasets"] = [data["datasets"][0] | {"path": given}, *data["datasets"][1:]]
        config = resolve_config(data, folder=tmp_path)
        assert config.datasets[0].model_dump()["path"] == written
        assert RunConfig.model_validate(config.model_dump()).datasets == config.datasets
