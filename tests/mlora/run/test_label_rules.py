"""What a run reads from the lines of a training file about its labels."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limited_runs import Watching, ask, submission
from mlora.config.adapter_config import AdapterConfig
from mlora.config.config_file import resolve_config
from mlora.config.dataset_config import DatasetConfig
from mlora.data.dataset import load_dataset
from mlora.data.label_formats import FoundLabels, LabelRules, find_labels
from mlora.data.readers import Row
from mlora.data.source import Source
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.run.run import train
from mlora.tasks.classifiers import label_rules, needs_no_tokenizer
from mlora.tasks.task import TaskBuilder
from peft import LoraConfig
from tiny_run import run_data, write_jsonl

from mlora_ext.adapters.trained_parts import labels_of

REGRESSION, SINGLE, SEVERAL = ("regression", "single_label_classification", "multi_label_classification")


def rules_of(
    folder: Path, labels: list[Any], task: str = "SEQ_CLS", format: str = "classification", **keys: Any
) -> LabelRules | None:
    key = "labels" if task == "TOKEN_CLS" else "label"
    path = write_jsonl(folder / "lines.jsonl", [{"text": "a", key: label} for label in labels])
    adapter = AdapterConfig(name="a", dataset="lines", lora={}, **keys)
    lora = LoraConfig(task_type=task)
    dataset = DatasetConfig(name="lines", path=str(path), format=format)
    return label_rules(adapter, lora, {"lines": dataset})


@pytest.mark.parametrize(
    ("labels", "keys", "expected"),
    [
        ([0, 2], {"num_labels": 3}, LabelRules("SEQ_CLS", SINGLE, 3)),
        (["b", "a", "b"], {}, LabelRules("SEQ_CLS", SINGLE, 2, ("a", "b"))),
        ([0.5, 1], {"num_labels": 1}, LabelRules("SEQ_CLS", REGRESSION, 1)),
        ([[0.5]], {"num_labels": 1}, LabelRules("SEQ_CLS", REGRESSION, 1)),
        ([[0.5, 2]], {"num_labels": 2, "problem_type": REGRESSION}, LabelRules("SEQ_CLS", REGRESSION, 2)),
        ([[], ["b"], ["a", "c"]], {}, LabelRules("SEQ_CLS", SEVERAL, 3, ("a", "b", "c"))),
        ([[0, 1, 1], [0]], {"num_labels": 3}, LabelRules("SEQ_CLS", SEVERAL, 3, flags=True)),
        ([[0, 1], [0, 0, 1]], {"num_labels": 3}, LabelRules("SEQ_CLS", SEVERAL, 3)),
        ([[0, 1], [1, 0]], {"num_labels": 2}, LabelRules("SEQ_CLS", SEVERAL, 2, flags=True)),
        ([[0, 1], [1]], {"num_labels": 2}, LabelRules("SEQ_CLS", SEVERAL, 2)),
        ([[], [0, 1]], {"num_labels": 2}, LabelRules("SEQ_CLS", SEVERAL, 2)),
        ([[1]], {"num_labels": 1, "problem_type": SEVERAL}, LabelRules("SEQ_CLS", SEVERAL, 1, flags=True)),
        ([[-100], ["O", -100, "B"]], {"task": "TOKEN_CLS"}, LabelRules("TOKEN_CLS", SINGLE, 2, ("B", "O"))),
        ([[0, -100]], {"task": "TOKEN_CLS", "num_labels": 2}, LabelRules("TOKEN_CLS", SINGLE, 2)),
        (["b"], {"label_names": ["b", "a"]}, LabelRules("SEQ_CLS", SINGLE, 2, ("b", "a"), listed=True)),
        ([1], {"label_names": ["b", "a"]}, LabelRules("SEQ_CLS", SINGLE, 2, ("b", "a"), listed=True)),
        (
            [[0, 1], [1, 1]],
            {"label_names": ["b", "a"]},
            LabelRules("SEQ_CLS", SEVERAL, 2, ("b", "a"), flags=True, listed=True),
        ),
        (
            [["a"]],
            {"label_names": ["b", "a"], "num_labels": 2},
            LabelRules("SEQ_CLS", SEVERAL, 2, ("b", "a"), listed=True),
        ),
        (
            [["O", -100]],
            {"task": "TOKEN_CLS", "label_names": ["O", "B"]},
            LabelRules("TOKEN_CLS", SINGLE, 2, ("O", "B"), listed=True),
        ),
    ],
)
def test_rules_follow_from_the_lines(
    tmp_path: Path, labels: list[Any], keys: dict[str, Any], expected: LabelRules
) -> None:
    assert rules_of(tmp_path, labels, **keys) == expected


def test_a_classifier_with_a_loss_of_ones_own_is_told_which_key_to_remove(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"^objective: task_type SEQ_CLS has a loss of its own; remove objective$"
    ):
        rules_of(tmp_path, [0, 1], objective="operator:neg")


@pytest.mark.parametrize(
    ("labels", "keys", "message"),
    [
        ([0, 1], {}, "num_labels: task_type SEQ_CLS needs the number of labels"),
        (["a", "a"], {}, "num_labels: task_type SEQ_CLS needs at least 2 labels, got 1"),
        (["a", "b"], {"num_labels": 3}, "has 2 labels; leave it out, or list all of them in label_names"),
        (
            ["a"],
            {"label_names": ["a", "b"], "num_labels": 3},
            "label_names: has 2 names, but num_labels is 3",
        ),
        (["a"], {"label_names": ["a", "a"]}, "label_names: expected a list of names that differ, got "),
        (["a"], {"label_names": ["a"]}, "num_labels: task_type SEQ_CLS needs at least 2 labels, got 1"),
        (
            [0.5],
            {"label_names": ["a", "b"], "problem_type": REGRESSION},
            "label_names: a regression predicts numbers; leave them out",
        ),
        (
            [0],
            {"task": "QUESTION_ANS", "label_names": ["a", "b"], "format": "question_answering"},
            "label_names: needs task_type SEQ_CLS or TOKEN_CLS",
        ),
        ([[0]], {"task": "TOKEN_CLS", "num_labels": 1}, "task_type TOKEN_CLS needs at least 2 labels, got 1"),
        (
            [[0]],
            {"task": "TOKEN_CLS", "num_labels": 2, "problem_type": SINGLE},
            "problem_type: needs task_type SEQ_CLS",
        ),
    ],
)
def test_refused(tmp_path: Path, labels: list[Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        rules_of(tmp_path, labels, **keys)


@pytest.mark.parametrize("training", [["O", "B"], [0, 1], [1, "O"]])
@pytest.mark.parametrize("evaluation", [["B", "O"], [1, 0], ["B", 0], [1, "O"]])
@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_listed_names_and_ids_mix_in_all_files(
    tmp_path: Path, task: str, training: list[Any], evaluation: list[Any]
) -> None:
    """The training data need not write labels as the evaluation data does, nor any file as its first line."""
    key, wrap = ("labels", lambda label: [label]) if task == "TOKEN_CLS" else ("label", lambda label: label)
    rules = rules_of(tmp_path, [wrap(label) for label in training], task, label_names=["O", "B", "C"])
    lines = [{"input_ids": [5], key: wrap(label)} for label in evaluation]
    path = write_jsonl(tmp_path / "held-out.jsonl", lines)
    found = load_dataset("held", path, "classification", max_length=8, vocab_size=9, labels=rules).samples
    assert [sample.labels for sample in found] == [(1,), (0,)]


@pytest.mark.parametrize(
    ("labels", "keys"),
    [
        (["b", "a", "b"], {}),
        ([[], ["b"], ["a", "c"]], {}),
        ([[0, 1], [1, 0]], {"num_labels": 2}),
        ([0, 2], {"num_labels": 3}),
    ],
)
def test_a_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: list[Any], keys: dict[str, Any]
) -> None:
    """And only up to the line that tells all."""
    read: list[int] = []
    rows = Source.rows

    def counted(source: Source) -> Iterator[Row]:
        for place, fields in rows(source):
            read.append(int(place.rpartition(":")[2]))
            yield place, fields

    monkeypatch.setattr(Source, "rows", counted)
    assert rules_of(tmp_path, labels, **keys) is not None
    assert read == ([1] if labels == [0, 2] else list(range(1, len(labels) + 1)))


def test_adapters_of_one_file_share_what_was_found(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counted(rows: Iterator[Row], task: str) -> FoundLabels:
        asked.append(task)
        return find_labels(rows, task)

    monkeypatch.setattr("mlora.tasks.task.find_labels", counted)
    path = write_jsonl(tmp_path / "mood.jsonl", [{"text": "a", "label": label} for label in ("x", "y", "x")])
    lora = {"task_type": "SEQ_CLS", "target_modules": ["q_proj"]}
    data = {
        "base_model": str(tiny_base),
        "output_dir": "run",
        "datasets": [{"name": "mood", "path": str(path), "format": "classification"}],
        "adapters": [{"name": name, "dataset": "mood", "lora": lora} for name in ("a", "b")],
    }
    config = resolve_config(data, folder=tmp_path)
    builder = TaskBuilder(config, BaseInfo(config.base_model))
    tasks = [builder.build(adapter) for adapter in config.adapters]
    assert asked == ["SEQ_CLS"]
    assert [labels_of(task.lora)["label_names"] for task in tasks if task.lora] == [["x", "y"]] * 2


@pytest.mark.parametrize(
    ("lines", "without"),
    [
        (b'\xef\xbb\xbf{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n', False),
        (b"\n" * 12 + b'{"text": "a", "label": 0}\n', False),
        (b'{"text": "a", "label": 0}\n\xff\n', False),
        (b'\xef\xbb\xbf{"input_ids": [5], "label": 0}\n', True),
        (b"{\n", True),
    ],
)
def test_lines_that_need_no_tokenizer(tmp_path: Path, lines: bytes, without: bool) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(lines)
    dataset = DatasetConfig(name="lines", path=str(path), format="classification")
    assert needs_no_tokenizer(dataset) is without


def test_a_file_with_a_byte_order_mark_is_read(tiny_base: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "mood.jsonl", [{"text": "ab", "label": "x"}, {"text": "c", "label": "y"}])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    data = {
        "base_model": str(tiny_base),
        "output_dir": "run",
        "datasets": [{"name": "mood", "path": str(path), "format": "classification"}],
        "adapters": [{"name": "a", "dataset": "mood", "lora": {"task_type": "SEQ_CLS"}}],
    }
    config = resolve_config(data, folder=tmp_path)
    task = TaskBuilder(config, BaseInfo(config.base_model)).build(config.adapters[0])
    assert [len(sample.input_ids) for sample in task.data.samples] == [2, 1]


def test_labels_of_a_file_that_is_mended_while_the_run_goes_on(tiny_base: Path, tmp_path: Path) -> None:
    data = run_data(tiny_base, tmp_path)
    data["datasets"].append({"name": "mood", "path": "mood.jsonl", "format": "classification"})
    data["adapters"] = [data["adapters"][1]]
    lora = {"r": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}

    def submit(name: str, last: Any) -> None:
        labels = ["x", "y", last]
        write_jsonl(tmp_path / "mood.jsonl", [{"text": "abc", "label": label} for label in labels])
        content = submission(data, tmp_path, name, dataset="mood", max_steps=1, lora=lora)
        ask(tmp_path / "run", "submit", name, content)

    acts = {("second", 2): lambda: submit("wrong", 7), ("second", 5): lambda: submit("right", "z")}
    found = train(resolve_config(data, folder=tmp_path), reporter=Watching(acts)).adapters
    assert (found["wrong"].state, found["right"].state) == ("refused", "finished")
    names = json.loads((tmp_path / "run" / "adapters" / "right" / "labels.json").read_text())
    assert list(names["id2label"].values()) == ["x", "y", "z"]
