"""Reads jsonl files into samples of token ids and labels."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.data.file_types import refuse_other_kinds
from mlora.data.format_hint import format_hint
from mlora.data.formats import parser_of
from mlora.data.label_formats import LabelRules
from mlora.data.record import FormatError, NoTokenizerError, Prompt, Record, check_ids, json_name, text_of_key
from mlora.data.record import Sample as Sample  # others import it from here
from mlora.errors import RunError
from mlora.objectives.registry import Style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Dataset:
    """A dataset as one task sees it."""

    # the samples with at least one trained token in each sequence, cut to the task's ``max_length``:
    # `Sample`, or one of `mlora.data.preference`
    samples: list[Any]
    # for ``prompt_completion`` and ``alpaca``, the prompts, in file order, of samples that were not cut and
    # that end with the end token; else empty
    prompts: list[Prompt]
    warnings: list[str]  # one line for each reason to cut, leave out or doubt samples
    fingerprint: str  # SHA-256 of the file
    path: str = ""


def load_dataset(
    name: str,
    path: str | Path,
    format: str,
    *,
    max_length: int,
    vocab_size: int,
    max_positions: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_only_loss: bool = False,
    style: Style = "dpo",
    labels: LabelRules | None = None,
) -> Dataset:
    """Reads a jsonl file. A RunError about a line names the file and the line's number.

    Args:
        name: the dataset's name, for messages.
        max_length: longer samples are cut to their first ``max_length`` tokens.
        max_positions: the longest sequence that the base model takes; None = unlimited.
        tokenizer: the base model's; only the format ``tokens`` needs none.
        assistant_only_loss: of messages, train only what the assistant says.
        style: which of TRL's trainers tokenises preference data so.
        labels: how labels are read; ``classification`` and ``question_answering`` need it.
    """
    path = Path(path)
    try:
        parse = parser_of(
            format, tokenizer, assistant_only_loss=assistant_only_loss, style=style, labels=labels
        )
    except FormatError as error:
        raise RunError(f"{path}: the dataset {name!r} of format {format}: {error}") from None
    refuse_other_kinds(path)
    records: list[tuple[int, Record]] = []
    for line, fields in read_lines(path):
        try:
            record = parse(fields)
            check_ids(record.sample, vocab_size)
        except NoTokenizerError as error:
            if not records:
                raise RunError(f"{path}:{line}: {error}") from None
            raise RunError(
                f"{path}:{line}: has {error.keys}, but the lines before it, from line {records[0][0]} on, "
                "have input_ids; write all lines of a file alike"
            ) from None
        except FormatError as error:
            raise RunError(f"{path}:{line}: {error}{format_hint(format, fields)}") from None
        records.append((line, record))
    if not records:
        raise RunError(f"{path}: the dataset {name!r} is empty")
    return _finish(name, path, records, max_length, max_positions)


def _finish(
    name: str, path: Path, records: list[tuple[int, Record]], max_length: int, max_positions: int | None
) -> Dataset:
    kept, prompts = [], []
    found: Counter[str] = Counter()
    for line, record in records:
        if max(part.rows for part in record.sample.parts) <= max_length:
            prompts += [record.prompt] if record.prompt else []
        else:
            found[f"are longer than max_length {max_length} and were cut"] += 1
        sample = record.sample.cut(max_length)
        longest = max(part.rows for part in sample.parts)
        if max_positions is not None and longest > max_positions:
            raise RunError(
                f"{path}:{line}: the sample has {longest} tokens, but the base model "
                f"takes at most {max_positions}; set max_length to {max_positions} or less"
            )
        if all(part.trained_tokens for part in sample.parts):
            kept.append(sample)
        else:
            found["have no trained token and are left out"] += 1
        if record.doubt:
            found[record.doubt] += 1
    counts = [f"{count} of {len(records)} samples {what}" for what, count in found.items()]
    if not kept:
        raise RunError(f"{path}: no sample of the dataset {name!r} has a trained token: {'; '.join(counts)}")
    warnings = [f"dataset {name!r}: {count}" for count in counts]
    return Dataset(kept, prompts, warnings, fingerprint(path), str(path))


def fingerprint(path: str | Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error


def read_prompt_lines(path: Path) -> list[str]:
    """Reads ``prompt`` of each object of a ``.jsonl`` file, or each line of a text file that is not blank.

    Objects without ``prompt`` may have ``text``, as those of classifiers.
    """
    refuse_other_kinds(path, plain_text=path.suffix != ".jsonl")
    if path.suffix != ".jsonl":
        try:
            return [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    prompts = []
    for number, fields in read_lines(path):
        try:
            key = "text" if "text" in fields and "prompt" not in fields else "prompt"
            prompts.append(text_of_key(fields, key))
        except FormatError as error:
            raise RunError(f"{path}:{number}: {error}") from None
    return prompts


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of each line that is not blank; a RunError names file and line."""
    for number, raw in _raw_lines(path):
        if not raw.strip():
            continue
        try:
            fields = json.loads(raw.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise RunError(f"{path}:{number}: is not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path}:{number}: is not JSON: {_json_fault(error, raw)}") from error
        if not isinstance(fields, dict):
            raise RunError(f"{path}:{number}: must be a JSON object, got {json_name(fields)}")
        yield number, fields


def _json_fault(error: Exception, line: bytes) -> str:
    if line.strip() == b"{":
        return "an object continues on the next line; write each object on one line"
    if isinstance(error, json.JSONDecodeError):  # its lineno counts within this one line: not shown
        reason = error.msg.removesuffix(" at")
        return f"{reason} at character {error.pos + 1}; expected one JSON object per line"
    if isinstance(error, RecursionError):
        return "brackets are nested too deeply"
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            yield from enumerate(file, 1)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
