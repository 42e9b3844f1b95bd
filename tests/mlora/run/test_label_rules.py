"""What a run reads from the lines of a training file about its labels."""

from pathlib import Path
from typing import Any

import pytest
from mlora.config.run_config import AdapterConfig
from mlora.config.sections import DatasetConfig
from mlora.data.label_formats import LabelRules
from mlora.errors import RunError
from mlora.tasks.classifiers import label_rules
from peft import LoraConfig
from tiny_run import write_jsonl

REGRESSION, SINGLE, SEVERAL = ("regression", "single_label_classification", "multi_label_classification")


def rules_of(folder: Path, labels: list[Any], task: str = "SEQ_CLS", **keys: Any) -> LabelRules | None:
    key = "labels" if task == "TOKEN_CLS" else "label"
    path = write_jsonl(folder / "lines.jsonl", [{"text": "a", key: label} for label in labels])
    adapter = AdapterConfig(name="a", dataset="lines", lora={}, **keys)
    lora = LoraConfig(task_type=task)
    lora.__dict__["num_labels"] = adapter.num_labels
    dataset = DatasetConfig(name="lines", path=str(path), format="classification")
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
        ([[1]], {"num_labels": 1, "problem_type": SEVERAL}, LabelRules("SEQ_CLS", SEVERAL, 1, flags=True)),
        ([[-100], ["O", -100, "B"]], {"task": "TOKEN_CLS"}, LabelRules("TOKEN_CLS", SINGLE, 2, ("B", "O"))),
        ([[0, -100]], {"task": "TOKEN_CLS", "num_labels": 2}, LabelRules("TOKEN_CLS", SINGLE, 2)),
    ],
)
def test_rules_follow_from_the_lines(
    tmp_path: Path, labels: list[Any], keys: dict[str, Any], expected: LabelRules
) -> None:
    assert rules_of(tmp_path, labels, **keys) == expected


@pytest.mark.parametrize(
    ("labels", "keys", "message"),
    [
        ([0, 1], {}, "num_labels: task_type SEQ_CLS needs the number of labels"),
        (["a", "a"], {}, "num_labels: task_type SEQ_CLS needs at least 2 labels, got 1"),
        (["a", "b"], {"num_labels": 3}, "has 2 labels; leave it out"),
        ([[0]], {"task": "TOKEN_CLS", "num_labels": 1}, "task_type TOKEN_CLS needs at least 2 labels, got 1"),
        (
            [[0]],
            {"task": "TOKEN_CLS", "num_labels": 2, "problem_type": SINGLE},
            "problem_type: needs lora.task_type: SEQ_CLS",
        ),
    ],
)
def test_refused(tmp_path: Path, labels: list[Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        rules_of(tmp_path, labels, **keys)
