"""Which messages of a chat are trained, and which tokens lie in given parts of its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mlora.data.record import FormatError

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
