"""The formats of a dataset: how a line becomes tokens, and which of them are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from mlora.config.dataset_config import FORMATS
from mlora.data.chat import ChatTemplate, messages_of_key, sharegpt_messages
from mlora.data.label_formats import LabelRules, classification, question_answering
from mlora.data.preference_formats import preference, unpaired
from mlora.data.record import (
    NOT_TRAINED,
    FormatError,
    Record,
    Sample,
    answer_to,
    common_start,
    flags_of_key,
    ids_of_key,
    text_ids,
    text_of_key,
    unmasked,
)
from mlora.objectives.registry import Style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parser = Callable[[dict[str, Any]], Record]
TRAINED_MASKS = {"completion_mask", "assistant_masks"}  # as TRL writes them beside tokens: 1 = trained
DOUBT = (
    "have a prompt whose last token changes when the completion follows; "
    "move the space between them to the completion's start"
)
# Stanford Alpaca's prompts: models tuned on such data were given them
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Input:\n{input}\n\n### Response:"
)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the rows of a source become samples.

    Attributes:
        path: of the source, for messages.
        format: of the rows.
        max_length: longer samples are cut to their first ``max_length`` tokens.
        vocab_size: of the base model; ids outside it are refused.
        max_positions: the longest sequence that the base model takes; None = unlimited.
        tokenizer: the base model's; lines with ``input_ids`` need none.
        assistant_only_loss: of messages, train only what the assistant says.
        style: which of TRL's trainers tokenises preference data so; see `mlora.data.preference_formats`.
        labels: how labels are read; ``classification`` and ``question_answering`` need it.
        ends: ids of the tokens that end an answer; samples have prompts if some are given.
    """

    path: str
    format: str
    max_length: int
    vocab_size: int
    max_positions: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_only_loss: bool = False
    style: Style = "dpo"
    labels: LabelRules | None = None
    ends: tuple[int, ...] = ()


def parser_of(reading: Reading) -> Parser:
    """Returns the function that reads a format's lines.

    Both raise FormatError: for what the tokenizer lacks, and for a malformed line.
    """
    format, tokenizer, ends = reading.format, reading.tokenizer, reading.ends
    if format == "tokens":
        return _tokens
    if format in ("classification", "question_answering"):
        if reading.labels is None:
            raise FormatError("needs an adapter whose lora.task_type has a head")
        if format == "question_answering":
            return question_answering(tokenizer)
        return classification(tokenizer, reading.labels)
    if tokenizer is None:
        raise FormatError("the base model has no tokenizer; use a dataset of format tokens")
    if format in ("messages", "sharegpt"):
        chat = ChatTemplate(tokenizer, assistant_only_loss=reading.assistant_only_loss, ends=ends)
        if format == "sharegpt":
            return lambda fields: chat.conversation(sharegpt_messages(fields), fields)
        return lambda fields: chat.conversation(messages_of_key(fields, "messages"), fields)
    if not isinstance(tokenizer.eos_token, str):
        raise FormatError("the base model's tokenizer has no end token (eos_token)")
    if format == "preference":
        return preference(tokenizer, reading.style)
    if format == "unpaired":
        return unpaired(tokenizer)
    if format == "prompt_completion":
        return _prompt_completion(tokenizer, reading.assistant_only_loss, ends)
    return _plain_text(tokenizer) if format == "text" else _alpaca(tokenizer, ends)


def _tokens(fields: dict[str, Any]) -> Record:
    ids = ids_of_key(fields, "input_ids")
    labels = ids_of_key(fields, "labels") if "labels" in fields else ids
    if len(labels) != len(ids):
        raise FormatError(f"'labels' has {len(labels)} entries, but 'input_ids' has {len(ids)}")
    for key in TRAINED_MASKS & fields.keys():
        flags = flags_of_key(fields, key, len(ids))
        labels = tuple(label if one else NOT_TRAINED for label, one in zip(labels, flags, strict=True))
    kept = unmasked(fields, len(ids))
    if len(kept) < len(ids):
        ids, labels = (tuple(values[place] for place in kept) for values in (ids, labels))
    return Record(Sample(ids, labels))


def _plain_text(tokenizer: PreTrainedTokenizerBase) -> Parser:
    end = str(tokenizer.eos_token)

    def parse(fields: dict[str, Any]) -> Record:
        text = text_of_key(fields, "text")
        ids = text_ids(tokenizer, text if text.endswith(end) else text + end)
        return Record(Sample(ids, ids))

    return parse


def _prompt_completion(
    tokenizer: PreTrainedTokenizerBase, assistant_only_loss: bool, ends: Sequence[int]
) -> Parser:
    chat = cache(lambda: ChatTemplate(tokenizer, assistant_only_loss=assistant_only_loss, ends=ends))

    def parse(fields: dict[str, Any]) -> Record:
        if isinstance(fields.get("prompt"), list):
            prompt, completion = messages_of_key(fields, "prompt"), messages_of_key(fields, "completion")
            return chat().completion(prompt, completion, fields)
        record = _completed(tokenizer, text_of_key(fields, "prompt"), text_of_key(fields, "completion"), ends)
        if assistant_only_loss:
            raise FormatError("assistant_only_loss needs messages, but 'prompt' is text")
        return record

    return parse


def _alpaca(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Parser:
    def parse(fields: dict[str, Any]) -> Record:
        instruction, output = text_of_key(fields, "instruction"), text_of_key(fields, "output")
        context = "" if fields.get("input") is None else text_of_key(fields, "input")
        template = ALPACA_WITH_INPUT if context else ALPACA
        return _completed(tokenizer, template.format(instruction=instruction, input=context), output, ends)

    return parse


def _completed(
    tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str, ends: Sequence[int]
) -> Record:
    """Returns the record of a completion; trains every token after the prompt's own, and the end token."""
    end = str(tokenizer.eos_token)
    completion = completion.removesuffix(end)
    start, ids = text_ids(tokenizer, prompt), text_ids(tokenizer, prompt + completion + end)
    place = common_start(start, ids)
    sample = Sample(ids, (NOT_TRAINED,) * place + ids[place:])
    asked = answer_to(tokenizer, ids, place, ends)
    if place == len(start):
        return Record(sample, asked)
    asked = asked and replace(asked, input_ids=start, completion=completion)  # what follows the whole prompt
    return Record(sample, asked, doubt=DOUBT)


def format_hint(format: str, fields: Mapping[str, Any]) -> str:
    """Returns the end of an error about a line: the format that has its keys.

    Empty if the line has all keys of its own format, those of none, or only keys that its own format has,
    too. The format that takes most of the line's keys is named.
    """
    own = [set(keys.split()) for keys in FORMATS[format].rows]
    if any(fields.keys() >= keys for keys in own):
        return ""
    found = [
        (other, keys.split())
        for other, each in FORMATS.items()
        for keys in each.rows
        if fields.keys() >= set(keys.split()) and not any(mine >= set(keys.split()) for mine in own)
    ]
    if not found:
        return ""
    other, keys = max(found, key=lambda each: len(each[1]))
    return f"; lines with {', '.join(map(repr, keys))} are format {other}"
