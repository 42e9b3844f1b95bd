"""One line of a dataset: checks of its fields, and the tokens that it becomes."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any

from mlora.memory.model import SilentRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_TRAINED = -100
_SHOWN = 12  # the most names in an error


class FormatError(Exception):
    """A line is wrong, or something that its format needs is missing; the catcher names file and line."""


class NoTokenizerError(FormatError):
    """A line with text came to a parser without a tokenizer.

    Args:
        keys: the line's text, for messages.
    """

    def __init__(self, keys: str) -> None:
        self.keys = keys
        super().__init__(f"the base model has no tokenizer; give input_ids in place of {keys}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of tokens."""

    input_ids: tuple[int, ...]  # token ids
    # as long as ``input_ids``; -100 = not trained. The first label is never trained, because no token
    # precedes it.
    labels: tuple[int, ...]

    @property
    def sequences(self) -> tuple[Sample, ...]:
        """The sequences that the sample is packed as: itself. A sample of another class may have several."""
        return (self,)

    @property
    def parts(self) -> tuple[Sample, ...]:
        """The sequences of the line that it was read from: itself."""
        return (self,)

    @property
    def silent(self) -> tuple[tuple[str, Sample], ...]:
        """Owners and sequences that are run without gradient for its loss: none."""
        return ()

    @property
    def facts(self) -> tuple[float, ...]:
        """Plain numbers that its loss reads: none."""
        return ()

    @property
    def units(self) -> int:
        """The number of samples that it stands for."""
        return 1

    @property
    def is_labelled(self) -> bool:
        """Whether `labels` are labels of the tokens themselves, for a head of the adapter's own."""
        return False

    @property
    def row_targets(self) -> tuple[int, ...]:
        """What is to be predicted from each token; -100 = nothing."""
        return (*self.labels[1:], NOT_TRAINED)

    @property
    def rows(self) -> int:
        """Rows of all its sequences."""
        return len(self.input_ids)

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that enter the loss."""
        targets = self.row_targets
        return len(targets) - targets.count(NOT_TRAINED)

    def cut(self, length: int) -> Sample:
        """Returns its first ``length`` tokens."""
        if len(self.input_ids) <= length:
            return self
        return Sample(self.input_ids[:length], self.labels[:length])


@dataclass(frozen=True, slots=True)
class LabelledSample(Sample):
    """One sequence whose tokens have labels; of a sequence with one label, the last token has it.

    A sequence with `values` has label 0 there: the numbers that its loss reads in place of a label, such as
    those of a regression, or 0 or 1 for each of several labels.
    """

    values: tuple[float, ...] = ()
    whole: bool = field(default=False, compare=False)  # whether the one label is that of the sequence

    @classmethod
    def of_sequence(cls, input_ids: tuple[int, ...], label: int = 0, *values: float) -> LabelledSample:
        """Returns a sequence that has one label, or values."""
        return cls(input_ids, (*[NOT_TRAINED] * (len(input_ids) - 1), label), values, whole=True)

    @property
    def facts(self) -> tuple[float, ...]:
        """Plain numbers that its loss reads: its values."""
        return self.values

    @property
    def is_labelled(self) -> bool:
        return True

    @property
    def row_targets(self) -> tuple[int, ...]:
        return self.labels

    def cut(self, length: int) -> LabelledSample:
        """Returns its first tokens; the label of the whole sequence goes to the new last token."""
        if len(self.input_ids) <= length:
            return self
        labels = self.labels[:length]
        if self.whole:
            labels = (*labels[:-1], self.labels[-1])
        return LabelledSample(self.input_ids[:length], labels, self.values, self.whole)


@dataclass(frozen=True, slots=True)
class AnswerSample(LabelledSample):
    """A question with its context, of which some tokens are the answer; `values` are the first and the last.

    Each token has label 0, since its place competes with the others.
    """

    @classmethod
    def of_answer(cls, input_ids: tuple[int, ...], first: int, last: int) -> AnswerSample:
        """Returns a sequence whose answer are the tokens from `first` to `last`."""
        return cls(input_ids, (0,) * len(input_ids), (first, last))

    def cut(self, length: int) -> AnswerSample:
        """Returns its first tokens; nothing is trained if the answer does not fit into them."""
        if len(self.input_ids) <= length:
            return self
        label = 0 if max(self.values) < length else NOT_TRAINED
        return AnswerSample(self.input_ids[:length], (label,) * length, self.values)


def sequence_lengths(samples: Iterable[Any]) -> list[int]:
    """Returns the rows of each sequence of some samples; those without gradient as `SilentRows`."""
    found: list[int] = []
    for sample in samples:
        found += [len(sequence.input_ids) for sequence in sample.sequences]
        found += [SilentRows(len(sequence.input_ids)) for _, sequence in sample.silent]
    return found


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and the completion that is expected from a model that learned it."""

    input_ids: tuple[int, ...]  # token ids of the prompt
    completion: str  # the expected text, without the end token
    completion_tokens: int  # the number of its tokens with the end token: the limit of generation


@dataclass(frozen=True, slots=True)
class Record:
    """What a line of a dataset becomes."""

    sample: Any  # `Sample`, or one of `mlora.data.preference`
    prompt: Prompt | None = None  # for exact match, if the line has a prompt and a completion
    doubt: str = ""  # a warning, worded to follow "3 of 7 samples"; empty if there is none


class TwiceError(ValueError):
    """An object of a JSON text has a key twice."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object of these pairs; raises TwiceError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise TwiceError(f"the key {twice!r} is given twice; remove one")
    return found


json_of = json.JSONDecoder(object_pairs_hook=once).decode
"""Returns the value of a JSON text; raises ValueError, or RecursionError, if it is none."""

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
    """Returns the JSON name of a value's type."""
    return JSON_NAMES.get(type(value), type(value).__name__)


def text_of_key(fields: dict[str, Any], key: str, name: str | None = None) -> str:
    """Returns a field that holds text; errors call it `name`, by default ``key`` in quotes."""
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
    """Returns a field that holds a list of whole numbers."""
    values = _value(fields, key, repr(key))
    if not isinstance(values, list):
        raise FormatError(f"{key!r} must be a list of whole numbers, got {json_name(values)}")
    for value in values:
        if type(value) is not int:
            raise FormatError(f"{key!r} must hold whole numbers, got {value!r}")
    return tuple(values)


def unmasked(fields: dict[str, Any], count: int) -> list[int]:
    """Returns the places of a line's tokens but those whose `attention_mask` is 0, which are padding.

    FormatError for a line that holds several samples, packed: they would attend to each other.
    """
    kept = list(range(count))
    if "attention_mask" in fields:
        mask = flags_of_key(fields, "attention_mask", count)
        kept = [place for place in kept if mask[place]]
    for key, several in (("position_ids", _jumps), ("seq_lengths", _parts)):
        if fields.get(key) is not None and several(ids_of_key(fields, key), kept, count):
            raise FormatError(
                f"{key!r} says that the line holds several samples; write each on a line of its own: they "
                "are packed here"
            )
    return kept


def _jumps(positions: Sequence[int], kept: Sequence[int], count: int) -> bool:
    """Whether the positions of the tokens at `kept` do not rise one by one."""
    if len(positions) != count:
        raise FormatError(f"'position_ids' has {len(positions)} entries, but 'input_ids' has {count}")
    return any(positions[b] != positions[a] + 1 for a, b in pairwise(kept))


def _parts(lengths: Sequence[int], kept: Sequence[int], count: int) -> bool:
    """Whether several parts of a line have tokens at `kept`."""
    ends = list(accumulate(lengths))
    return len({bisect_right(ends, place) for place in kept}) > 1


def flags_of_key(fields: dict[str, Any], key: str, count: int) -> tuple[int, ...]:
    """Returns a field that holds 0 or 1 for each of a line's `count` tokens."""
    flags = ids_of_key(fields, key)
    if len(flags) != count:
        raise FormatError(f"{key!r} has {len(flags)} entries, but 'input_ids' has {count}")
    if wrong := set(flags) - {0, 1}:
        raise FormatError(f"{key!r} must hold 0 and 1, got {min(wrong)}")
    return flags


def objects_of_key(fields: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns a field that holds a list of at least one object."""
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
        raise FormatError(f"{name} is missing; the {where} has {names_of(fields)}")
    return fields[key]


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, end: bool = False) -> tuple[int, ...]:
    """Returns a text's tokens after the start tokens that the tokenizer adds, which stand there once.

    Some tokenizers append an end token to every text. It is left out: a prompt goes on, and an answer writes
    its own. `end` keeps it, once, as classifiers read it.
    """
    found = tokenizer(text, return_special_tokens_mask=True)
    ids, added = tuple(found["input_ids"]), found["special_tokens_mask"]
    if 0 in added:
        first, last = added.index(0), len(added) - added[::-1].index(0)
    else:  # nothing lies between start and end: a letter tells where the text would be
        first = last = (*tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"], 0).index(0)
    start, own, tail = ids[:first], ids[first:last], ids[last:]
    if own[: len(start)] == start:
        start = ()
    if not end or own[len(own) - len(tail) :] == tail:
        tail = ()
    return start + own + tail


def answer_to(
    tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...], place: int, ends: Sequence[int]
) -> Prompt | None:
    """Returns the prompt ``ids[:place]`` with the answer up to the first of `ends`; None if none follows."""
    stop = next((at for at in range(place, len(ids)) if ids[at] in ends), None)
    if stop is None:
        return None
    wanted = tokenizer.decode(list(ids[place:stop]), clean_up_tokenization_spaces=False)
    return Prompt(ids[:place], str(wanted), stop + 1 - place)


def names_of(fields: Mapping[str, Any], none: str = "no keys") -> str:
    """Returns the names of a line's fields, for messages: the first ones, if there are many."""
    more = ", ..." if len(fields) > _SHOWN else ""
    return ", ".join(map(repr, islice(fields, _SHOWN))) + more or none


def common_start(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Returns how many tokens two sequences share before they differ."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def check_ids(sample: Any, vocab_size: int) -> None:
    """Raises FormatError for the first id or label of a line's sequences outside a vocabulary."""
    for part in sample.parts:
        _check_part(part, vocab_size)


def _check_part(sample: Sample, vocab_size: int) -> None:
    if (value := _first_outside(sample.input_ids, vocab_size)) is not None:
        raise FormatError(f"token id {value} is outside the base model's vocabulary of {vocab_size}")
    labels = () if sample.is_labelled else sample.labels
    if (value := _first_outside(labels, vocab_size, NOT_TRAINED)) is not None:
        raise FormatError(
            f"label {value} is outside the base model's vocabulary of {vocab_size} and is not {NOT_TRAINED}"
        )


def _first_outside(values: Sequence[int], vocab_size: int, *others: int) -> int | None:
    wrong = {value for value in set(values).difference(others) if not 0 <= value < vocab_size}
    return next(value for value in values if value in wrong) if wrong else None
