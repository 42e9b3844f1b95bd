"""Lines with labels and answers: the tokens and labels that they become, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from mlora.config.config_file import resolve_config
from mlora.data.dataset import load_dataset
from mlora.data.label_formats import LabelRules
from mlora.data.record import AnswerSample, LabelledSample
from mlora.errors import RunError
from mlora.model.base_info import BaseInfo
from mlora.tasks.task import TaskBuilder
from tiny_run import save_tokenizer, write_jsonl
from transformers import PreTrainedTokenizerFast

SINGLE = LabelRules("SEQ_CLS", "single_label_classification", 3)
NAMED = LabelRules("SEQ_CLS", "single_label_classification", 2, ("bad", "good"))
NUMBER, PAIR = (LabelRules("SEQ_CLS", "regression", count) for count in (1, 2))
SEVERAL = LabelRules("SEQ_CLS", "multi_label_classification", 3)
FLAGS = LabelRules("SEQ_CLS", "multi_label_classification", 3, flags=True)
TOPICS = LabelRules("SEQ_CLS", "multi_label_classification", 3, ("news", "sport", "war"))
LISTED = LabelRules("SEQ_CLS", "single_label_classification", 2, ("bad", "good"), listed=True)
LISTED_FLAGS = LabelRules(
    "SEQ_CLS", "multi_label_classification", 3, ("news", "sport", "war"), flags=True, listed=True
)
LISTED_TOPICS = LabelRules("SEQ_CLS", "multi_label_classification", 3, ("news", "sport", "war"), listed=True)
TOKENS = LabelRules("TOKEN_CLS", "single_label_classification", 3)
NAMED_TOKENS = LabelRules("TOKEN_CLS", "single_label_classification", 2, ("NAME", "O"))
ANSWERS = LabelRules("QUESTION_ANS", "", 2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """One token for each byte."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def load(
    folder: Path, rules: LabelRules, line: dict[str, Any], tokenizer: Any = None, length: int = 64
) -> Any:
    path = write_jsonl(folder / "lines.jsonl", [line])
    format = "question_answering" if rules is ANSWERS else "classification"
    more = {"max_length": length, "vocab_size": 260, "tokenizer": tokenizer, "labels": rules}
    return load_dataset("lines", path, format, **more).samples[0]


@pytest.mark.parametrize(
    ("rules", "label", "expected", "values"),
    [
        (SINGLE, 2, 2, ()),
        (NAMED, "good", 1, ()),
        (NUMBER, 1.5, 0, (1.5,)),
        (NUMBER, [-2], 0, (-2.0,)),
        (PAIR, [0.5, 3], 0, (0.5, 3.0)),
        (SEVERAL, [2, 0], 0, (1.0, 0.0, 1.0)),
        (SEVERAL, [], 0, (0.0, 0.0, 0.0)),
        (FLAGS, [0, 1, 1], 0, (0.0, 1.0, 1.0)),
        (FLAGS, [True, False, 1.0], 0, (1.0, 0.0, 1.0)),
        (TOPICS, ["war", "news"], 0, (1.0, 0.0, 1.0)),
        (LISTED, 1, 1, ()),
        (LISTED, "good", 1, ()),
        (LISTED_FLAGS, [1, 0, 1], 0, (1.0, 0.0, 1.0)),
        (LISTED_FLAGS, ["war", "news"], 0, (1.0, 0.0, 1.0)),
        (LISTED_TOPICS, ["war", 0], 0, (1.0, 0.0, 1.0)),
    ],
)
def test_the_label_of_a_line(
    tmp_path: Path, rules: LabelRules, label: Any, expected: int, values: tuple[float, ...]
) -> None:
    found = load(tmp_path, rules, {"input_ids": [5, 6, 7], "label": label})
    assert found == LabelledSample((5, 6, 7), (-100, -100, expected), values)
    assert found.cut(2) == LabelledSample((5, 6), (-100, expected), values)


@pytest.mark.parametrize(
    ("rules", "labels", "expected"),
    [(TOKENS, [2, -100, 0], (2, -100, 0)), (NAMED_TOKENS, ["O", -100, "NAME"], (1, -100, 0))],
)
def test_labels_of_tokens(tmp_path: Path, rules: LabelRules, labels: Any, expected: Any) -> None:
    found = load(tmp_path, rules, {"input_ids": [5, 6, 7], "labels": labels})
    assert found == LabelledSample((5, 6, 7), expected)


@pytest.mark.parametrize(
    ("context", "answer", "begin"),
    [
        ("Ann has a red cat.", "red cat", 10),
        ("Zoë saw Øre.", "Øre", 8),
        ("a cat, a cat", "cat", 9),
        ("x", "x", 0),
    ],
)
def test_an_answer_of_squad(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, context: str, answer: str, begin: int
) -> None:
    line = {
        "question": "Which?",
        "context": context,
        "answers": {"text": [answer, "a"], "answer_start": [begin, 0]},
    }
    found = load(tmp_path, ANSWERS, line, tokenizer)
    first, last = (int(place) for place in found.facts)
    assert tokenizer.decode(found.input_ids[first : last + 1]) == answer
    assert tokenizer.decode(found.input_ids[:first]) == "Which?" + context[:begin]
    assert found.row_targets == (0,) * found.rows


def test_an_answer_that_is_cut_off_and_one_that_does_not_exist(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    line = {"question": "Who?", "context": "Ann", "answers": {"text": ["Ann"], "answer_start": [0]}}
    assert load(tmp_path, ANSWERS, line, tokenizer, 7).facts == (4, 6)
    with pytest.raises(RunError, match="1 of 1 samples have no trained token and are left out"):
        load(tmp_path, ANSWERS, line, tokenizer, 6)
    none = line | {"answers": {"text": [], "answer_start": []}}
    assert load(tmp_path, ANSWERS, none, tokenizer, 3).facts == (0, 0)
    ids = {"input_ids": [5, 6, 7], "start_positions": 1, "end_positions": 2}
    assert load(tmp_path, ANSWERS, ids) == AnswerSample.of_answer((5, 6, 7), 1, 2)


def test_padding_is_dropped_with_its_labels(tmp_path: Path) -> None:
    padded = {"input_ids": [9, 5, 6, 7, 9], "attention_mask": [0, 1, 1, 1, 0]}
    assert load(tmp_path, SINGLE, padded | {"label": 2}) == LabelledSample.of_sequence((5, 6, 7), 2)
    tokens = padded | {"labels": [-100, 0, 1, 2, -100]}
    assert load(tmp_path, TOKENS, tokens) == LabelledSample((5, 6, 7), (0, 1, 2))
    answer = padded | {"start_positions": 2, "end_positions": 3}
    assert load(tmp_path, ANSWERS, answer) == AnswerSample.of_answer((5, 6, 7), 1, 2)
    with pytest.raises(RunError, match="'start_positions' must be the place of a token, 1 to 3, got 0"):
        load(tmp_path, ANSWERS, padded | {"start_positions": 0, "end_positions": 1})


IDS: dict[str, Any] = {"input_ids": [5, 6, 7]}
SQUAD: dict[str, Any] = {"question": "Who?", "context": "Ann"}


def answered(text: Any, start: Any) -> dict[str, Any]:
    return SQUAD | {"answers": {"text": text, "answer_start": start}}


@pytest.mark.parametrize(
    ("rules", "line", "message"),
    [
        (SINGLE, IDS | {"labels": [0, 1, 2]}, "'label' is missing: task_type SEQ_CLS needs one"),
        (SINGLE, IDS | {"label": 3}, "'label': label 3 is outside of 0 to 2 (num_labels: 3)"),
        (SINGLE, IDS | {"label": True}, "'label' must be a whole number, got True"),
        (SINGLE, IDS | {"label": "a"}, "'label' must be a whole number, got 'a'"),
        (SINGLE, IDS | {"label": 0.5}, "got 0.5; a regression has num_labels: 1"),
        (SINGLE, {"input_ids": [], "label": 0}, "'input_ids' has no tokens"),
        (SINGLE, {"text": "", "label": 0}, "'text' has no tokens"),
        (SINGLE, {"label": 0}, "'input_ids' is missing; the line has 'label'"),
        (NAMED, IDS | {"label": "ugly"}, "'label': expected one of the known labels (bad, good), got 'ugly'"),
        (NAMED, IDS | {"label": 1}, "'label': expected one of the known labels (bad, good), got 1"),
        (LISTED, IDS | {"label": 2}, "'label': label 2 is outside of 0 to 1 (num_labels: 2)"),
        (LISTED, IDS | {"label": True}, "'label': expected one of the known labels (bad, good), got True"),
        (NUMBER, IDS | {"label": "1"}, "'label' must be a number in a regression, got '1'"),
        (NUMBER, IDS | {"label": float("nan")}, "'label' must be a number in a regression, got nan"),
        (NUMBER, IDS | {"label": 10**400}, "'label' must be a number in a regression, got 1000"),
        (PAIR, IDS | {"label": 1.0}, "'label' must be a list of 2 numbers in a regression, got 1.0"),
        (SEVERAL, IDS | {"label": 1}, "'label' must be a list where samples have several labels, got 1"),
        (SEVERAL, IDS | {"label": [1, 1]}, "'label' names a label twice: [1, 1]"),
        (SEVERAL, IDS | {"label": [3]}, "'label': label 3 is outside of 0 to 2"),
        (FLAGS, IDS | {"label": [0, 1]}, "'label' must hold 0 or 1 for each of 3 labels, got [0, 1]"),
        (TOPICS, IDS | {"label": ["peace"]}, "'label': expected one of the known labels (news, sport, war)"),
        (TOKENS, IDS | {"label": 1}, "'labels' is missing: task_type TOKEN_CLS needs a label for each of"),
        (TOKENS, IDS | {"labels": [0, 1]}, "'labels' needs one label for each of 3 'input_ids', got 2"),
        (TOKENS, IDS | {"labels": 1}, "'labels' needs one label for each of 3 'input_ids', got a number"),
        (TOKENS, IDS | {"labels": [0, 1, 3]}, "'labels': label 3 is outside of 0 to 2"),
        (TOKENS, {"text": "abc", "labels": [0, 1, 2]}, "'text': task_type TOKEN_CLS needs 'input_ids'"),
        (ANSWERS, IDS | {"start_positions": 1}, "'end_positions' must be the place of a token, 0 to 2"),
        (ANSWERS, IDS | {"start_positions": 3}, "'start_positions' must be the place of a token, 0 to 2"),
        (ANSWERS, IDS | {"start_positions": 2, "end_positions": 1}, "'end_positions' is 1, before 'start"),
        (ANSWERS, SQUAD, "'answers' must be {\"text\": [...], \"answer_start\": [...]} with one place for"),
        (ANSWERS, answered("Ann", 0), "'answers' must be"),
        (ANSWERS, answered(["Bob"], [0]), "'answers': 'Bob' is not at character 0 of 'context'"),
        (ANSWERS, answered(["n"], [-1]), "'answers': 'n' is not at character -1"),
        (ANSWERS, answered([""], [0]), "'answers': 'text' must hold texts"),
        (ANSWERS, {"question": "Who?", "answers": {}}, "'context' is missing"),
    ],
)  # fmt: skip
def test_a_fault_names_file_line_and_key(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rules: LabelRules, line: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError) as error:
        load(tmp_path, rules, line, tokenizer)
    assert str(error.value).startswith(f"{tmp_path / 'lines.jsonl'}:1: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_label_that_is_cut_off_moves_to_no_other_token() -> None:
    tagged = LabelledSample((5, 6, 7), (-100, -100, 1))
    assert tagged.cut(2) == LabelledSample((5, 6), (-100, -100))
    assert LabelledSample.of_sequence((5, 6, 7), 1).cut(2) == LabelledSample((5, 6), (-100, 1))


@pytest.mark.parametrize(
    ("rules", "ids", "text", "keys"),
    [
        (NUMBER, {"input_ids": [5, 6], "label": 1}, {"text": "a", "label": 1}, "text"),
        (
            ANSWERS,
            {"input_ids": [5, 6], "start_positions": 0, "end_positions": 1},
            {"question": "a?", "context": "b", "answers": {"text": ["b"], "answer_start": [0]}},
            "question and context",
        ),
    ],
)
def test_text_after_lines_of_ids(
    tiny_base: Path, tmp_path: Path, rules: LabelRules, ids: dict[str, Any], text: dict[str, Any], keys: str
) -> None:
    """The message names the kinds of lines, not the tokenizer, which the base has."""
    path = write_jsonl(tmp_path / "lines.jsonl", [*[ids] * 10, text])
    format = "question_answering" if rules is ANSWERS else "classification"
    lora = {"task_type": rules.task, "target_modules": ["q_proj"]}
    adapter = {"name": "a", "dataset": "lines", "lora": lora}
    data = {
        "base_model": str(tiny_base),
        "output_dir": "run",
        "datasets": [{"name": "lines", "path": str(path), "format": format}],
        "adapters": [adapter | ({"num_labels": 1} if rules is NUMBER else {})],
    }
    config = resolve_config(data, folder=tmp_path)
    with pytest.raises(RunError) as error:
        TaskBuilder(config, BaseInfo(config.base_model)).build(config.adapters[0])
    assert str(error.value) == (
        f"{path}:11: has {keys}, but the lines before it, from line 1 on, have input_ids; "
        "write all lines of a file alike"
    )
    write_jsonl(path, [text])
    with pytest.raises(RunError, match=f"lines.jsonl:1: the base model has no tokenizer; give .* of {keys}"):
        load_dataset("lines", path, format, max_length=9, vocab_size=260, labels=rules)
