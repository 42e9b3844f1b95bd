"""The formats `classification` and `question_answering`: how a line becomes tokens with labels.

One pass over a file finds what its labels look like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from mlora.data.readers import Row
from mlora.data.record import (
    NOT_TRAINED,
    AnswerSample,
    FormatError,
    LabelledSample,
    NoTokenizerError,
    Record,
    ids_of_key,
    json_name,
    names_of,
    text_ids,
    text_of_key,
    unmasked,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class FoundLabels:
    """What the labels of a file look like.

    Attributes:
        first: the first label, of lists the first that holds more than -100; None: no line has one.
        names: the labels that are text, sorted, if `first` is text or holds text; else empty.
        lengths: of lists of numbers, the numbers of values, up to the list that decides `flags`.
        flags: whether these lists hold 0 and 1 as flags: one of them repeats a value, which ids do not, or
            none of them shows that they are ids.
    """

    first: Any = None
    names: tuple[str, ...] = ()
    lengths: frozenset[int] = frozenset()
    flags: bool = True

    @property
    def is_text(self) -> bool:
        """Whether the first label is text, or a list with text."""
        return _is_text(self.first)

    def are_flags(self, count: int | None) -> bool:
        """Whether lists hold 0 or 1 for each of `count` labels, not ids."""
        return self.flags and self.lengths <= {count}


def find_labels(rows: Iterable[Row], task: str) -> FoundLabels:
    """Reads the labels of a dataset's rows, up to the one that tells all; those that are text to the end.

    Args:
        task: the adapter's `task_type`.

    Raises:
        RunError: the file cannot be read.
    """
    labels = _labels(rows, task)
    before: list[Any] = []  # lists without any label
    first = None
    for given in labels:
        if given is not None and (not isinstance(given, list) or any(one != -100 for one in given)):
            first = given
            break
        before += [] if given is None else [given]
    if _is_text(first):
        return FoundLabels(first, _names(chain([first], labels)))
    lists = chain(before, [first], labels) if isinstance(first, list) else before
    return FoundLabels(first, (), *_sizes(lists))


def _labels(rows: Iterable[Row], task: str) -> Iterator[Any]:
    """Yields the labels of a dataset's lines; None where a line has none."""
    for _, fields in rows:
        yield fields.get("labels" if task == "TOKEN_CLS" else "label")


def _is_text(given: Any) -> bool:
    return any(isinstance(one, str) for one in (given if isinstance(given, list) else [given]))


def _names(labels: Iterable[Any]) -> tuple[str, ...]:
    each = (one for given in labels for one in (given if isinstance(given, list) else [given]))
    return tuple(sorted({one for one in each if isinstance(one, str)}))


def _sizes(labels: Iterable[Any]) -> tuple[frozenset[int], bool]:
    """Returns `FoundLabels.lengths` and `flags`."""
    lengths = set()
    for given in labels:
        if isinstance(given, list):
            lengths.add(len(given))
            if any(one not in (0, 1) for one in given):
                return frozenset(lengths), False
            if given.count(0) > 1 or given.count(1) > 1:
                break
    return frozenset(lengths), True


_SHOWN = 12  # the most names of labels in an error
_LARGEST = 3e38  # of fp32, in which losses are computed


@dataclass(frozen=True)
class LabelRules:
    """How the labels of lines are read for an adapter.

    Attributes:
        task: its `task_type`.
        problem: Transformers' `problem_type`.
        count: the number of labels.
        names: what the labels are called, in the order of their ids; empty: lines have numbers.
        flags: whether a list of numbers holds 0 or 1 for each label; else it holds the sample's labels.
        listed: whether the config or a trained head names the labels; else the training data does. Lines may
            have ids where names are listed.
    """

    task: str
    problem: str
    count: int
    names: tuple[str, ...] = ()
    flags: bool = False
    listed: bool = False

    @cached_property
    def ids(self) -> dict[str, int]:
        """The labels' ids by their names."""
        return {name: place for place, name in enumerate(self.names)}


def classification(
    tokenizer: PreTrainedTokenizerBase | None, rules: LabelRules
) -> Callable[[dict[str, Any]], Record]:
    """Returns the parser of lines with `text` or `input_ids`, and `label` or `labels`."""

    def parse(fields: dict[str, Any]) -> Record:
        key = "labels" if rules.task == "TOKEN_CLS" else "label"
        if key not in fields:
            raise FormatError(_missing(key, fields))
        if rules.task != "TOKEN_CLS":
            ids = _unpadded(fields, tokenizer)[0]
            label, values = _of_sample(fields[key], rules)
            return Record(LabelledSample.of_sequence(ids, label, *values))
        if "text" in fields:
            raise FormatError(
                "'text': task_type TOKEN_CLS needs 'input_ids', and a label for each in 'labels'"
            )
        (ids, kept), labels = _unpadded(fields, tokenizer), fields[key]
        count = len(fields["input_ids"])
        if not isinstance(labels, list) or len(labels) != count:
            got = f"{len(labels)} entries" if isinstance(labels, list) else json_name(labels)
            raise FormatError(f"'labels' needs one label for each of {count} 'input_ids', got {got}")
        return Record(LabelledSample(ids, tuple(_token_label(labels[place], rules) for place in kept)))

    return parse


def question_answering(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[dict[str, Any]], Record]:
    """Returns the parser of lines as SQuAD has them, or with `input_ids` and both positions."""

    def parse(fields: dict[str, Any]) -> Record:
        if "input_ids" in fields:
            ids, kept = _unpadded(fields, None)
            first, last = (_position(fields, key, kept) for key in ("start_positions", "end_positions"))
            if last < first:
                raise FormatError(f"'end_positions' is {last}, before 'start_positions', which is {first}")
            return Record(AnswerSample.of_answer(ids, first, last))
        if tokenizer is None:
            raise NoTokenizerError("question and context")
        if not tokenizer.is_fast:
            raise FormatError("the base model's tokenizer gives no places of tokens; give input_ids")
        return Record(_answered(fields, tokenizer))

    return parse


def _answered(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> AnswerSample:
    question, context = text_of_key(fields, "question"), text_of_key(fields, "context")
    span = _span(fields.get("answers"), context)
    encoded = tokenizer(question, context, return_offsets_mapping=True)
    ids = tuple(encoded["input_ids"])
    if span is None:  # as in Transformers' examples
        marks = (tokenizer.cls_token_id, tokenizer.bos_token_id)
        place = next((ids.index(mark) for mark in marks if mark in ids), 0)
        return AnswerSample.of_answer(ids, place, place)
    begin, end = span
    owners, offsets = encoded.sequence_ids(0), encoded["offset_mapping"]
    inside = [
        place
        for place, (owner, (start, stop)) in enumerate(zip(owners, offsets, strict=True))
        if owner == 1 and start < end and stop > begin
    ]
    if not inside:
        raise FormatError(f"'answers': no token of 'context' is at characters {begin} to {end}")
    return AnswerSample.of_answer(ids, inside[0], inside[-1])


def _span(answers: Any, context: str) -> tuple[int, int] | None:
    """Returns the characters of the first answer; None if there is none."""
    lists: list[Any] = (
        [answers.get(key) for key in ("text", "answer_start")] if isinstance(answers, dict) else []
    )
    if not lists or not all(isinstance(one, list) for one in lists) or len(lists[0]) != len(lists[1]):
        raise FormatError(
            '\'answers\' must be {"text": [...], "answer_start": [...]} with one place for each text, '
            f"got {answers!r}"
        )
    if not lists[0]:
        return None
    text, start = lists[0][0], lists[1][0]
    if not isinstance(text, str) or not text:
        raise FormatError(f"'answers': 'text' must hold texts that are not empty, got {text!r}")
    if type(start) is not int or context[max(0, start) : max(0, start) + len(text)] != text or start < 0:
        raise FormatError(f"'answers': {text!r} is not at character {start!r} of 'context'")
    return start, start + len(text)


def _unpadded(
    fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> tuple[tuple[int, ...], list[int]]:
    """Returns a line's tokens without its padding, and their places in `input_ids`."""
    key = "text" if "text" in fields and "input_ids" not in fields else "input_ids"
    if key == "text":
        if tokenizer is None:
            raise NoTokenizerError("text")
        ids = text_ids(tokenizer, text_of_key(fields, "text"), end=True)
    else:
        ids = ids_of_key(fields, "input_ids")
    kept = unmasked(fields, len(ids)) if key == "input_ids" else list(range(len(ids)))
    if not kept:
        raise FormatError(f"{key!r} has no tokens")
    return tuple(ids[place] for place in kept), kept


def _missing(key: str, fields: dict[str, Any]) -> str:
    if key == "label":
        return (
            f"'label' is missing: task_type SEQ_CLS needs one for the line, such as \"label\": 0; "
            f"the line has {names_of(fields)}"
        )
    return (
        "'labels' is missing: task_type TOKEN_CLS needs a label for each of 'input_ids', such as "
        f'"labels": [0, {NOT_TRAINED}, 2] ({NOT_TRAINED} = none); '
        f"the line has {names_of(fields)}"
    )


def _of_sample(given: Any, rules: LabelRules) -> tuple[int, tuple[float, ...]]:
    """Returns a line's label, or its values."""
    if rules.problem == "regression":
        return 0, _numbers(given, rules.count)
    if rules.problem == "multi_label_classification":
        return 0, _flags(given, rules)
    return _id(given, rules, "'label'"), ()


def _token_label(given: Any, rules: LabelRules) -> int:
    if given == NOT_TRAINED and type(given) is int:
        return NOT_TRAINED
    return _id(given, rules, "'labels'")


def _id(given: Any, rules: LabelRules, what: str) -> int:
    """Returns the id of a label, which is a name or a number."""
    if rules.names and not (rules.listed and type(given) is int):
        if isinstance(given, str) and given in rules.ids:
            return rules.ids[given]
        known = ", ".join(rules.names[:_SHOWN]) + (", ..." if len(rules.names) > _SHOWN else "")
        hint = "; these are the training data's: list all labels in label_names"
        if rules.listed or not isinstance(given, str):
            hint = ""
        raise FormatError(f"{what}: expected one of the known labels ({known}), got {given!r}{hint}")
    if type(given) is not int:
        hint = "; a regression has num_labels: 1" if type(given) is float else ""
        raise FormatError(f"{what} must be a whole number, got {given!r}{hint}")
    if not 0 <= given < rules.count:
        raise FormatError(
            f"{what}: label {given} is outside of 0 to {rules.count - 1} (num_labels: {rules.count})"
        )
    return given


def _numbers(given: Any, count: int) -> tuple[float, ...]:
    values = given if isinstance(given, list) else [given]
    if len(values) != count or not all(type(v) in (int, float) and abs(v) <= _LARGEST for v in values):
        wanted = "a number" if count == 1 else f"a list of {count} numbers"
        raise FormatError(f"'label' must be {wanted} in a regression, got {given!r}")
    return tuple(map(float, values))


def _flags(given: Any, rules: LabelRules) -> tuple[float, ...]:
    """Returns 0 or 1 for each label."""
    if not isinstance(given, list):
        raise FormatError(f"'label' must be a list where samples have several labels, got {given!r}")
    if rules.flags and not any(isinstance(one, str) for one in given):
        if len(given) != rules.count or not all(value in (0, 1) for value in given):
            raise FormatError(f"'label' must hold 0 or 1 for each of {rules.count} labels, got {given!r}")
        return tuple(map(float, given))
    ids = [_id(one, rules, "'label'") for one in given]
    if len(set(ids)) < len(ids):
        raise FormatError(f"'label' names a label twice: {given!r}")
    return tuple(float(place in ids) for place in range(rules.count))


def _position(fields: dict[str, Any], key: str, kept: list[int]) -> int:
    """Returns the place among the tokens `kept` of one that the line names by its place in `input_ids`."""
    place = fields.get(key)
    if type(place) is not int or place not in kept:
        raise FormatError(f"{key!r} must be the place of a token, {kept[0]} to {kept[-1]}, got {place!r}")
    return kept.index(place)
