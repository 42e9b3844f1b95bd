"""One line of a dataset: its fields, checked, and the tokens that come of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

NOT_TRAINED = -100


class FormatError(Exception):
    """A line, or what its format needs to be read at all, is wrong; who catches it names file and line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of tokens.

    Args:
        input_ids: token ids.
        labels: as long as ``input_ids``; -100 where nothing is learned. The trained tokens are those of
            ``labels[1:]`` that are not -100, since the first token has nothing before it.
    """

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """The sequences that it is packed as: itself. A sample of another class may have several."""
        return (self,)

    @property
    def rows(self) -> int:
        """Rows of all its sequences."""
        return len(self.input_ids)

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that enter the loss."""
        return sum(label != NOT_TRAINED for label in self.labels[1:])


def sequence_lengths(samples: Iterable[Sample]) -> list[int]:
    """Returns the rows of each sequence of some samples, in order."""
    return [len(sequence.input_ids) for sample in samples for sequence in sample.sequences]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the completion that is expected of a model that learned it.

    Args:
        input_ids: token ids of the prompt.
        completion: the expected text, without the end token.
        completion_tokens: the number of its tokens with the end token; a model may use no more.
    """

    input_ids: tuple[int, ...]
    completion: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Record:
    """What comes of a line.

    Args:
        sample: its tokens.
        prompt: for a prompt with its completion, what exact match asks for.
        doubt: what is doubtful about it, worded to follow "3 of 7 samples"; empty when nothing is.
    """

    sample: Sample
    prompt: Prompt | None = None
    doubt: str = ""


JSON_NAMES = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


def json_name(value: Any) -> str:
    """Return what a value is called in JSON."""
    return JSON_NAMES.get(type(value), type(value).__name__)


def text_of_key(fields: dict[str, Any], key: str, name: str | None = None) -> str:
    """Return a field that holds text.

    Args:
        fields: a line, or an object within it.
        key: the field.
        name: how to call it in errors, by default ``key`` in quotes.

    Raises:
        FormatError: it is missing, is no text, or cannot be encoded.
    """
    name = name or repr(key)
    value = _value(fields, key, name)
    if not isinstance(value, str):
        raise FormatError(f"{name} must be text, got {json_name(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{name} is not valid text: half of a surrogate pair at character {error.start}"
        ) from None
    return value


def ids_of_key(fields: dict[str, Any], key: str) -> tuple[int, ...]:
    """Return a field that holds a list of whole numbers.

    Args:
        fields: a line.
        key: the field.

    Raises:
        FormatError: it is missing or something else.
    """
    values = _value(fields, key, repr(key))
    if not isinstance(values, list):
        raise FormatError(f"{key!r} must be a list of whole numbers, got {json_name(values)}")
    for value in values:
        if type(value) is not int:
            raise FormatError(f"{key!r} must hold whole numbers, got {value!r}")
    return tuple(values)


def objects_of_key(fields: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a field that holds a list of at least one object.

    Args:
        fields: a line.
        key: the field.

    Raises:
        FormatError: it is missing, empty or something else.
    """
    values = _value(fields, key, repr(key))
    if not isinstance(values, list):
        raise FormatError(f"{key!r} must be a list of objects, got {json_name(values)}")
    if not values:
        raise FormatError(f"{key!r} is empty; at least one message is needed")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise FormatError(f"{key}[{index}] must be an object, got {json_name(value)}")
    return values


def _value(fields: dict[str, Any], key: str, name: str) -> Any:
    if key not in fields:
        where = "line" if name == repr(key) else "message"
        raise FormatError(f"{name} is missing; the {where} has {', '.join(map(repr, fields)) or 'no keys'}")
    return fields[key]


def common_start(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many tokens two sequences have in common before they differ."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def check_ids(sample: Sample, vocab_size: int) -> None:
    """Check that a sample's ids and labels lie within a vocabulary.

    Raises:
        FormatError: naming the first that does not.
    """
    for value in sample.input_ids:
        if not 0 <= value < vocab_size:
            raise FormatError(f"token id {value} is outside the base model's vocabulary of {vocab_size}")
    for value in sample.labels:
        if value != NOT_TRAINED and not 0 <= value < vocab_size:
            raise FormatError(
                f"label {value} is outside the base model's vocabulary of {vocab_size} "
                f"and is not {NOT_TRAINED}"
            )
