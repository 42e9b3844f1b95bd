"""Preference data, tokenised as TRL's trainers do it.

``DPOTrainer`` and ``KTOTrainer`` (style `dpo`) tokenise the prompt and the whole text, and the completion
begins where both differ. ``CPOTrainer`` and ``ORPOTrainer`` (style `cpo`) tokenise without special tokens,
then add those of beginning and end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from mlora.data.chat import ChatTemplate, Message, messages_of_key, refuse_marks
from mlora.data.preference import Judged, Pair
from mlora.data.record import (
    NOT_TRAINED,
    FormatError,
    Record,
    Sample,
    common_start,
    json_name,
    names_of,
    text_ids,
    text_of_key,
)
from mlora.objectives.registry import Style

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parser = Callable[[dict[str, Any]], Record]
Half = str | list[Message]
"""A prompt or a completion: text, or messages."""

DOUBT = (
    "have a prompt whose end changes when a completion follows; the changed tokens are trained with the "
    "completion"
)
SAME = "have a chosen completion that equals the rejected one"


def preference(tokenizer: PreTrainedTokenizerBase, style: Style) -> Parser:
    """Returns the function that reads lines of ``prompt``, ``chosen`` and ``rejected``.

    Without ``prompt``, the start that both completions share is the prompt.
    """
    chat = cache(lambda: ChatTemplate(tokenizer))

    def parse(fields: dict[str, Any]) -> Record:
        halves = [_half(fields, key) for key in ("chosen", "rejected")]
        if "prompt" in fields:
            prompt = _half(fields, "prompt")
        else:
            prompt, *halves = _shared(halves[0], halves[1])
        _same_kind({"prompt": prompt, "chosen": halves[0], "rejected": halves[1]})
        same = SAME if halves[0] == halves[1] else ""
        if style == "dpo":
            start, wholes = _dpo_ids(tokenizer, chat, prompt, halves, fields)
            place = min(common_start(start, whole) for whole in wholes)
            chosen, rejected = (_sample(whole[:place], whole[place:]) for whole in wholes)
            return Record(Pair(chosen, rejected), doubt=same or (DOUBT if place < len(start) else ""))
        texts = _cpo_texts(chat, prompt, halves, fields)
        return Record(_cpo_pair(tokenizer, *texts), doubt=same)

    return parse


def unpaired(tokenizer: PreTrainedTokenizerBase) -> Parser:
    """Returns the function that reads lines of ``prompt``, ``completion`` and ``label`` (true or false)."""
    chat = cache(lambda: ChatTemplate(tokenizer))

    def parse(fields: dict[str, Any]) -> Record:
        prompt, completion = _half(fields, "prompt"), _half(fields, "completion")
        if "label" not in fields:
            raise FormatError(f"'label' is missing; the line has {names_of(fields)}")
        label = fields["label"]
        if type(label) not in (bool, int) or label not in (0, 1):
            got = label if type(label) is int else json_name(label)
            raise FormatError(f"'label' must be true or false (or 1 or 0), got {got}")
        _same_kind({"prompt": prompt, "completion": completion})
        start, (whole,) = _dpo_ids(tokenizer, chat, prompt, [completion], fields)
        place = common_start(start, whole)
        found = Judged(whole[:place], whole[place:], bool(label))
        return Record(found, doubt=DOUBT if place < len(start) else "")

    return parse


def _half(fields: dict[str, Any], key: str) -> Half:
    if isinstance(fields.get(key), list):
        messages = messages_of_key(fields, key) if fields[key] or key != "prompt" else []
        refuse_marks(messages)
        return messages
    return text_of_key(fields, key)


def _same_kind(halves: dict[str, Half]) -> None:
    kinds = {key: "text" if isinstance(half, str) else "messages" for key, half in halves.items()}
    if len(set(kinds.values())) > 1:
        told = ", ".join(f"{key!r} is {kind}" for key, kind in kinds.items())
        raise FormatError(f"all must be text, or all lists of messages; {told}")


def _shared(chosen: Half, rejected: Half) -> tuple[Half, Half, Half]:
    """Splits off the prompt that two completions begin with, as TRL's ``extract_prompt``."""
    least = min(len(chosen), len(rejected))
    differs = next((i for i in range(least) if chosen[i] != rejected[i]), None)
    place = max(0, least - 1) if differs is None else differs
    if differs and chosen[place - 1] == " ":  # the space belongs to the completions
        place -= 1
    return chosen[:place], chosen[place:], rejected[place:]


def _dpo_ids(
    tokenizer: PreTrainedTokenizerBase,
    chat: Callable[[], ChatTemplate],
    prompt: Half,
    completions: list[Half],
    fields: dict[str, Any],
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the tokens of the prompt, and of the prompt with each completion and the end token."""
    if isinstance(prompt, str):
        end = str(tokenizer.eos_token)
        texts = [str(half) if str(half).endswith(end) else f"{half}{end}" for half in completions]
        ids = [text_ids(tokenizer, text) for text in (prompt, *(prompt + text for text in texts))]
        return ids[0], ids[1:]
    start = chat().tokens(prompt, fields, add_generation_prompt=True)["input_ids"]
    wholes = [chat().tokens([*prompt, *half], fields)["input_ids"] for half in completions]
    return tuple(start), [tuple(whole) for whole in wholes]


def _sample(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Sample:
    return Sample(prompt + completion, (NOT_TRAINED,) * len(prompt) + completion)


def _cpo_texts(
    chat: Callable[[], ChatTemplate], prompt: Half, completions: list[Half], fields: dict[str, Any]
) -> tuple[str, str, str]:
    """Returns prompt and completions as text; the template's prompt ends where a completion changes it."""
    if isinstance(prompt, str):
        return prompt, str(completions[0]), str(completions[1])
    answered = bool(prompt) and prompt[-1]["role"] == "assistant"
    how = {"continue_final_message": answered, "add_generation_prompt": not answered}
    start = chat().text(prompt, fields, **how)
    wholes = [chat().text([*prompt, *half], fields) for half in completions]
    for whole in wholes:
        same = zip(start, whole, strict=False)
        place = next((i for i, (a, b) in enumerate(same) if a != b), min(len(start), len(whole)))
        start = start[:place]
    return start, wholes[0][len(start) :], wholes[1][len(start) :]


def _cpo_pair(tokenizer: PreTrainedTokenizerBase, prompt: str, chosen: str, rejected: str) -> Pair:
    """Returns a pair as ``tokenize_row`` of TRL's ``CPOTrainer`` makes it, before it is cut."""
    halves = [_cpo_halves(tokenizer, prompt, answer) for answer in (chosen, rejected)]
    (first, _), (second, _) = halves
    differ = sum(a != b for a, b in zip(first, second, strict=False))
    if differ > 1 or abs(len(first) - len(second)) > 1:
        raise FormatError("the prompt's tokens change when a completion follows; end the prompt with a space")
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    found = []
    for start, answer in halves:
        if begin is not None and start[:1] != (begin,):
            start = (begin, *start)
        if answer[-1:] != (end,):
            answer = (*answer, end)
        found.append(_sample(start, answer))
    return Pair(*found)


def _cpo_halves(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the tokens of prompt and answer, tokenised together; the prompt's last one may have merged."""
    start = tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    whole = tuple(tokenizer(prompt + answer, add_special_tokens=False)["input_ids"])
    if len(whole) < len(start):
        raise FormatError("the prompt's tokens change when a completion follows; end the prompt with a space")
    place = len(start) - (start != whole[: len(start)])
    return whole[:place], whole[place:]
