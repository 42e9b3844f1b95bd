"""Turns messages into tokens with the base model's chat template, as TRL's ``SFTTrainer`` does.

A mark says of a message whether it is trained.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from mlora.data.record import (
    NOT_TRAINED,
    FormatError,
    Record,
    Sample,
    answer_to,
    common_start,
    json_name,
    json_of,
    objects_of_key,
    text_of_key,
)
from mlora.data.template_trial import try_template
from mlora.errors import UNREADABLE, RunError, first_line
from mlora.regular_files import read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MARKS = ("weight", "loss", "train", "training", "trainable")
"""Keys that say whether a message is trained: of OpenAI, ms-swift, axolotl (two) and tinker-cookbook."""
FINER = ("train_detail", "training_detail", "loss_scale")
"""Keys with which axolotl and ms-swift weigh parts of a message."""


def untrained(messages: Sequence[dict[str, Any]], prompt: int, *, assistant_only: bool) -> list[int]:
    """Returns the indices of messages that would be trained, but are marked as not trained.

    Args:
        messages: of a chat.
        prompt: the number of messages that it begins with and that are not trained.
        assistant_only: whether only the assistant's messages are trained.

    Raises:
        FormatError: a mark has an odd value, contradicts another one, or asks for more than is trained.
    """
    found = []
    for index, message in enumerate(messages):
        if (mark := _mark(message, name := f"message {index + 1} ({message['role']})")) is None:
            continue
        why = "a prompt is not trained" if index < prompt else ""
        if assistant_only and message["role"] != "assistant":
            why = why or "assistant_only_loss trains only what the assistant says"
        if mark and why:
            raise FormatError(f"{name} is marked as trained, but {why}; remove the mark")
        if not (mark or why):
            found.append(index)
    return found


def refuse_marks(messages: Sequence[dict[str, Any]]) -> None:
    """Raises FormatError if a message is marked as trained or not, where completions are trained whole."""
    for index, message in enumerate(messages):
        for key in (*MARKS, *FINER):
            if message.get(key) is not None:
                raise FormatError(
                    f"message {index + 1} ({message['role']}): preference data cannot mark messages with "
                    f"{key!r}; remove it"
                )


def _mark(message: dict[str, Any], name: str) -> bool | None:
    """Returns whether a message is marked as trained; None if it has no mark."""
    for key in FINER:
        if message.get(key) is not None:
            raise FormatError(f"{name}: {key!r} weighs parts of a message, which is not supported; remove it")
    marks = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise FormatError(f"{name}: {key!r} must be true or false (or 1 or 0), got {value!r}")
    if len(set(marks.values())) > 1:
        told = " and ".join(f"{key!r} is {value!r}" for key, value in marks.items())
        raise FormatError(f"{name}: {told}; remove one")
    return next(map(bool, marks.values()), None)


def overlapping(places: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Returns for each token whether it has characters in one of `spans`, as Transformers 5.24 decides it.

    Args:
        places: of the tokens: first character, and the one after the last.
        spans: likewise; both in the order of the text.
    """
    found, index = [], 0
    for begin, end in places:
        while index < len(spans) and begin >= spans[index][1]:
            index += 1
        found.append(index < len(spans) and end > spans[index][0])
    return found


Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("user", "assistant", "system", "tool")
}
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
NOT_THE_TEMPLATES = {"tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"}
NOT_THE_TEMPLATES |= {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
DOUBT = (
    "have a prompt whose end the chat template changes when a completion follows; "
    "the changed tokens are trained with the completion"
)
NO_PROMPT = (
    "have a last answer that the chat template opens in another way than add_generation_prompt; exact match "
    "leaves them out"
)


def with_template(
    tokenizer: PreTrainedTokenizerBase, path: str | None, *, assistant_only_loss: bool
) -> PreTrainedTokenizerBase:
    """Returns a tokenizer whose chat template is that of a file, and marks the assistant's text if need be.

    For `assistant_only_loss`, a template without marks that TRL knows is replaced by TRL's training template,
    if TRL is installed.

    Args:
        path: of a Jinja file; None: the tokenizer's own template.

    Raises:
        RunError: the file cannot be read.
    """
    template = tokenizer.chat_template
    if path is not None:
        try:
            template = read_regular(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RunError(f"chat_template: {path}: cannot be read: {reason}") from error
    own = copy.copy(tokenizer)
    own.chat_template = template
    if assistant_only_loss and isinstance(template, str) and not GENERATION.search(template):
        own.chat_template = _of_trl(own) or template
    return own


def _of_trl(tokenizer: PreTrainedTokenizerBase) -> str | None:
    from jinja2 import TemplateError

    try:
        from trl.chat_template_utils import get_training_chat_template
    except ImportError:
        return None
    with suppress(ValueError, TemplateError):  # a template that it does not know
        return get_training_chat_template(tokenizer)
    return None


def messages_of_key(fields: dict[str, Any], key: str) -> list[Message]:
    """Returns a field that holds a list of messages ``{"role": ..., "content": ...}``.

    A message with ``tool_calls`` needs no content; templates tell null from none at all. Other keys of a
    message are for the template, unless they are null.
    """
    messages = []
    for index, message in enumerate(objects_of_key(fields, key)):
        where = f"{key}[{index}]"
        _check_choice(text_of_key(message, "role", f"{where}.role"), ROLES, f"{where}.role")
        own = {name: value for name, value in message.items() if value is not None or name == "content"}
        if own.get("content") is not None or not own.get("tool_calls"):
            own["content"] = _content(message, "content", where)
        messages.append(own)
    return messages


def _content(message: Message, key: str, where: str) -> str:
    """Returns a message's text: of a list of parts their texts, as templates that take lists write them."""
    parts = message.get(key)
    if not isinstance(parts, list):
        return text_of_key(message, key, f"{where}.{key}")
    texts = []
    for index, part in enumerate(parts):
        name = f"{where}.{key}[{index}]"
        if not isinstance(part, dict):
            raise FormatError(f"{name} must be an object, got {json_name(part)}")
        if part.get("type") != "text":
            kind = part.get("type", "no type")
            raise FormatError(f"{name} must be of type 'text', the only kind that is trained; got {kind!r}")
        texts.append(text_of_key(part, "text", f"{name}.text"))
    return "".join(texts)


def sharegpt_messages(fields: dict[str, Any]) -> list[Message]:
    """Returns the messages of a ShareGPT line: ``conversations``, after an optional ``system`` message."""
    messages = []
    if fields.get("system") not in (None, ""):
        messages.append({"role": "system", "content": text_of_key(fields, "system")})
    for index, turn in enumerate(objects_of_key(fields, "conversations")):
        where = f"conversations[{index}]"
        speaker = text_of_key(turn, "from", f"{where}.from")
        _check_choice(speaker, SHAREGPT_ROLES, f"{where}.from")
        marks = {key: turn[key] for key in (*MARKS, *FINER) if key in turn}
        content = _content(turn, "value", where)
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": content, **marks})
    return messages


def _check_choice(value: str, known: Any, name: str) -> None:
    if value not in known:
        raise FormatError(f"{name} must be one of {', '.join(known)}, got {value!r}")


class ChatTemplate:
    """A tokenizer's chat template. FormatError if the tokenizer has none.

    With `assistant_only_loss`, only tokens that the template marks as the assistant's are trained. A
    FormatError says if it marks none. Records have prompts if `ends` names the tokens that end an answer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        assistant_only_loss: bool = False,
        ends: Sequence[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise FormatError(
                "messages need a chat template, and the base model's tokenizer has none; give one in "
                "chat_template, or write prompts as text in the format prompt_completion"
            )
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise FormatError(f"the base model's chat template: {first_line(error)}") from None
        if assistant_only_loss and not GENERATION.search(template):
            raise FormatError(
                "assistant_only_loss needs {% generation %} and {% endgeneration %} around the assistant's "
                "text in the chat template, which has none: give a template with them in chat_template, "
                "install trl, which has such templates for known models, or remove assistant_only_loss"
            )
        try_template(tokenizer)
        self._tokenizer = tokenizer
        self._assistant_only = assistant_only_loss
        self._ends = ends

    def conversation(self, messages: list[Message], fields: dict[str, Any]) -> Record:
        """Returns the record of a conversation; `fields` is its line, with options for the template.

        If the assistant has the last word, that is the answer to all before it.
        """
        ids, labels = self._render(messages, fields)
        sample = Sample(ids, labels)
        if not self._ends or messages[-1]["role"] != "assistant" or len(messages) == 1:
            return Record(sample)
        start = self.tokens(messages[:-1], fields, add_generation_prompt=True)["input_ids"]
        if common_start(tuple(start), ids) < len(start):
            return Record(sample, doubt=NO_PROMPT)
        return Record(sample, answer_to(self._tokenizer, ids, len(start), self._ends))

    def completion(self, prompt: list[Message], completion: list[Message], fields: dict[str, Any]) -> Record:
        """Returns the record of messages `completion` that follow the messages `prompt`.

        The prompt is rendered with the opening of the answer (``add_generation_prompt``). Training starts at
        the first token that differs from it. The record has a prompt if an end token ends the completion.
        """
        start = self.tokens(prompt, fields, add_generation_prompt=True)["input_ids"]
        ids, labels = self._render(prompt + completion, fields, len(prompt))
        place = common_start(tuple(start), ids)
        sample = Sample(ids, (NOT_TRAINED,) * place + labels[place:])
        if place < len(start):
            return Record(sample, doubt=DOUBT)
        return Record(sample, answer_to(self._tokenizer, ids, place, self._ends))

    def question(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a user's message and of the opening of the answer."""
        message = {"role": "user", "content": text}
        return tuple(self.tokens([message], {}, add_generation_prompt=True)["input_ids"])

    def _render(
        self, messages: list[Message], fields: dict[str, Any], prompt: int = 0
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tokens of messages, of which the first `prompt` ones are not trained, and labels."""
        silent = untrained(messages, prompt, assistant_only=self._assistant_only)
        if not (silent or self._assistant_only):
            ids = tuple(self.tokens(messages, fields)["input_ids"])
            return ids, ids
        if not self._tokenizer.is_fast:
            raise FormatError(
                "assistant_only_loss and messages marked as not trained need a fast tokenizer, which knows "
                "where tokens stand in the text; the base model's does not"
            )
        text, spans = self._marked(messages, fields)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = tuple(found["input_ids"]), found["offset_mapping"]
        marked = overlapping(places, spans) if self._assistant_only else [True] * len(ids)
        masked = overlapping(places, self._spans(messages, fields, text, silent))
        each = zip(ids, marked, masked, strict=True)
        return ids, tuple(token if mark and not mask else NOT_TRAINED for token, mark, mask in each)

    def _marked(self, messages: list[Message], fields: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of messages, and which characters the template marks as the assistant's.

        `apply_chat_template` gives a mask of tokens, but a wrong one before Transformers 5.24: a token with
        only a part of the last character, or none after it, leaves the mask on or off up to the next turn.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tools, options = _tools(fields), _options(fields)
        with _refusal():
            # annotated as one text, but returns a list of texts and one of lists of spans
            rendered: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=self._assistant_only,
                **{**self._tokenizer.special_tokens_map, **options},
            )
        (text,), spans = rendered
        return text, spans[0] if spans else []

    def _spans(
        self, messages: list[Message], fields: dict[str, Any], text: str, wanted: list[int]
    ) -> list[tuple[int, int]]:
        """Returns where the messages `wanted` stand in the text of all, from the end of the one before."""

        def end(index: int, count: int) -> int:
            if count in (0, len(messages)):
                return count and len(text)
            with suppress(FormatError):
                start = self.text(messages[:count], fields)
                for each in (start, start.removesuffix(str(self._tokenizer.eos_token))):  # ends a whole chat
                    if text.startswith(each):
                        return len(each)
            raise FormatError(
                f"message {index + 1} is marked as not trained, but the chat template writes messages "
                "another way when others follow, so where it stands is unknown; name a template that only "
                "appends in chat_template, or remove the mark"
            )

        return [(end(index, index), end(index, index + 1)) for index in wanted]

    def tokens(self, messages: list[Message], fields: dict[str, Any], **how: Any) -> Any:
        """Returns what the template makes of messages, by the tokenizer's names: `input_ids` and others."""
        return self._apply(messages, fields, tokenize=True, return_dict=True, **how)

    def text(self, messages: list[Message], fields: dict[str, Any], **how: Any) -> str:
        """Returns the text that the template makes of messages."""
        return str(self._apply(messages, fields, tokenize=False, **how))

    def _apply(self, messages: list[Message], fields: dict[str, Any], **how: Any) -> Any:
        tools, options = _tools(fields), _options(fields)
        with _refusal():
            return self._tokenizer.apply_chat_template(messages, tools=tools, **how, **options)


@contextmanager
def _refusal() -> Iterator[None]:
    """Reports what a template raises as a FormatError."""
    from jinja2 import TemplateError

    try:
        yield
    except (TemplateError, *UNREADABLE, MemoryError) as error:
        raise FormatError(f"the chat template refuses the messages: {first_line(error)}") from None


def _options(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns what a line gives the template besides its messages and tools."""
    options = fields.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise FormatError(f"'chat_template_kwargs' must be an object, got {json_name(options)}")
    for key in options:
        if key in NOT_THE_TEMPLATES:
            raise FormatError(f"'chat_template_kwargs': {key!r} is not a template variable; remove it")
    return options


def _tools(fields: dict[str, Any]) -> list[Any] | None:
    """Returns the tools of a line: a list of objects, or that list written as JSON; empty text means none."""
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json_of(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise FormatError(f"'tools' is not JSON: {first_line(error)}") from None
    return objects_of_key({"tools": tools}, "tools") if tools else None
