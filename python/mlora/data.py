"""Datasets: jsonl files read into samples of token ids and labels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.errors import RunError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NOT_TRAINED = -100


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
    def trained_tokens(self) -> int:
        """The number of tokens that enter the loss."""
        return sum(label != NOT_TRAINED for label in self.labels[1:])


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


@dataclass(frozen=True)
class Dataset:
    """A dataset as one task sees it.

    Args:
        samples: the samples with at least one trained token, cut to the task's ``max_length``.
        prompts: for ``prompt_completion``, the prompts in file order of the samples that were not cut; else
            empty.
        warnings: one line for each kind of sample that was cut, left out or is doubtful.
        fingerprint: SHA-256 of the file.
    """

    samples: list[Sample]
    prompts: list[Prompt]
    warnings: list[str]
    fingerprint: str


@dataclass(frozen=True, slots=True)
class _Record:
    line: int
    sample: Sample
    prompt: Prompt | None = None
    joined: bool = False


def load_dataset(
    name: str,
    path: str | Path,
    format: str,
    *,
    max_length: int,
    vocab_size: int,
    max_positions: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Dataset:
    """Read a jsonl file.

    Args:
        name: the dataset's name, for messages.
        path: the file.
        format: ``tokens``, ``text`` or ``prompt_completion``.
        max_length: longer samples are cut to their first ``max_length`` tokens.
        vocab_size: token ids lie below it.
        max_positions: the longest sequence that the base model takes, or none.
        tokenizer: the base model's; ``tokens`` needs none.

    Returns:
        The dataset.

    Raises:
        RunError: the file is missing or empty, a line is malformed (with the file and the line's number), or
            nothing in it would be trained.
    """
    path = Path(path)
    parse = _PARSERS[format](tokenizer, path)
    records = []
    for line, fields in _read_lines(path):
        try:
            record = parse(line, fields)
            _check_ids(record.sample, vocab_size)
        except _BadLineError as error:
            raise RunError(f"{path}:{line}: {error}") from None
        records.append(record)
    if not records:
        raise RunError(f"{path}: the dataset {name!r} is empty")
    return _finish(name, path, records, max_length, max_positions)


def _finish(
    name: str, path: Path, records: list[_Record], max_length: int, max_positions: int | None
) -> Dataset:
    warnings, kept, prompts, cut, untrained = [], [], [], 0, 0
    for record in records:
        sample = record.sample
        if len(sample.input_ids) <= max_length:
            prompts += [record.prompt] if record.prompt else []
        else:
            cut += 1
            sample = Sample(sample.input_ids[:max_length], sample.labels[:max_length])
        if max_positions is not None and len(sample.input_ids) > max_positions:
            raise RunError(
                f"{path}:{record.line}: the sample has {len(sample.input_ids)} tokens, but the base model "
                f"takes at most {max_positions}; set max_length to {max_positions} or less"
            )
        if sample.trained_tokens:
            kept.append(sample)
        else:
            untrained += 1
    count = f"of {len(records)} samples"
    if cut:
        warnings.append(
            f"dataset {name!r}: {cut} {count} are longer than max_length {max_length} and were cut"
        )
    if not kept:
        raise RunError(f"{path}: no sample of the dataset {name!r} has a trained token")
    if untrained:
        warnings.append(f"dataset {name!r}: {untrained} {count} have no trained token and are left out")
    joined = sum(record.joined for record in records)
    if joined:
        warnings.append(
            f"dataset {name!r}: in {joined} {count} the prompt's last token changes when the completion "
            "follows; move the space between them to the completion's start"
        )
    return Dataset(kept, prompts, warnings, fingerprint(path))


def fingerprint(path: str | Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_prompt_lines(path: Path) -> list[str]:
    """Read prompts from a file.

    Args:
        path: jsonl of objects with ``prompt``, where its name ends so; else text of one prompt a line.

    Returns:
        The prompts in order; blank lines are none.

    Raises:
        RunError: the file cannot be read, or a line has no prompt.
    """
    if path.suffix != ".jsonl":
        try:
            return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    prompts = []
    for number, fields in _read_lines(path):
        try:
            prompts.append(_text(fields, "prompt"))
        except _BadLineError as error:
            raise RunError(f"{path}:{number}: {error}") from None
    return prompts


class _BadLineError(Exception):
    pass


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below, after the error of opening is told apart
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                fields = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise RunError(f"{path}:{number}: is not UTF-8: {error.reason}") from error
            except (ValueError, RecursionError) as error:  # ValueError: a number of too many digits, too
                raise RunError(f"{path}:{number}: is not JSON: {first_line(error)}") from error
            if not isinstance(fields, dict):
                raise RunError(f"{path}:{number}: must be a JSON object, got {type(fields).__name__}")
            yield number, fields


def _text(fields: dict[str, Any], key: str) -> str:
    if key not in fields:
        raise _BadLineError(f"{key!r} is missing; the line has {', '.join(map(repr, fields)) or 'no keys'}")
    value = fields[key]
    if not isinstance(value, str):
        raise _BadLineError(f"{key!r} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _BadLineError(
            f"{key!r} is no text: half of a surrogate pair at character {error.start}"
        ) from None
    return value


def _ids(fields: dict[str, Any], key: str) -> tuple[int, ...]:
    if key not in fields:
        raise _BadLineError(f"{key!r} is missing; the line has {', '.join(map(repr, fields)) or 'no keys'}")
    values = fields[key]
    if not isinstance(values, list):
        raise _BadLineError(f"{key!r} must be a list of whole numbers, got {type(values).__name__}")
    for value in values:
        if type(value) is not int:
            raise _BadLineError(f"{key!r} must hold whole numbers, got {value!r}")
    return tuple(values)


def _check_ids(sample: Sample, vocab_size: int) -> None:
    for value in sample.input_ids:
        if not 0 <= value < vocab_size:
            raise _BadLineError(f"token id {value} is outside the base model's vocabulary of {vocab_size}")
    for value in sample.labels:
        if value != NOT_TRAINED and not 0 <= value < vocab_size:
            raise _BadLineError(
                f"label {value} is outside the base model's vocabulary of {vocab_size} "
                f"and is not {NOT_TRAINED}"
            )


Parser = Callable[[int, dict[str, Any]], _Record]


def _tokens(tokenizer: PreTrainedTokenizerBase | None, path: Path) -> Parser:
    def parse(line: int, fields: dict[str, Any]) -> _Record:
        ids = _ids(fields, "input_ids")
        labels = _ids(fields, "labels") if "labels" in fields else ids
        if len(labels) != len(ids):
            raise _BadLineError(f"'labels' has {len(labels)} entries, but 'input_ids' has {len(ids)}")
        return _Record(line, Sample(ids, labels))

    return parse


def _plain_text(tokenizer: PreTrainedTokenizerBase | None, path: Path) -> Parser:
    tokenizer, end = _with_end_token(tokenizer, path)

    def parse(line: int, fields: dict[str, Any]) -> _Record:
        text = _text(fields, "text")
        ids = tuple(tokenizer(text if text.endswith(end) else text + end)["input_ids"])
        return _Record(line, Sample(ids, ids))

    return parse


def _prompt_completion(tokenizer: PreTrainedTokenizerBase | None, path: Path) -> Parser:
    tokenizer, end = _with_end_token(tokenizer, path)

    def parse(line: int, fields: dict[str, Any]) -> _Record:
        prompt, completion = _text(fields, "prompt"), _text(fields, "completion").removesuffix(end)
        start = tuple(tokenizer(prompt)["input_ids"])
        ids = tuple(tokenizer(prompt + completion + end)["input_ids"])
        labels = (NOT_TRAINED,) * len(ids[: len(start)]) + ids[len(start) :]
        wanted = Prompt(start, completion, len(ids) - len(start))
        return _Record(line, Sample(ids, labels), wanted, joined=ids[: len(start)] != start)

    return parse


def _with_end_token(
    tokenizer: PreTrainedTokenizerBase | None, path: Path
) -> tuple[PreTrainedTokenizerBase, str]:
    if tokenizer is None:
        raise RunError(f"{path}: the base model has no tokenizer; use a dataset of format tokens")
    if not isinstance(tokenizer.eos_token, str):
        raise RunError(f"{path}: the base model's tokenizer has no end token (eos_token)")
    return tokenizer, tokenizer.eos_token


_PARSERS: dict[str, Callable[[PreTrainedTokenizerBase | None, Path], Parser]] = {
    "tokens": _tokens,
    "text": _plain_text,
    "prompt_completion": _prompt_completion,
}
