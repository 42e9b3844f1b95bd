"""Says which format a line has, if it lacks the keys of its dataset's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",), ("input_ids", "labels")),
    "text": (("text",),),
    "prompt_completion": (("prompt", "completion"),),
    "alpaca": (("instruction", "output"),),
    "sharegpt": (("conversations",),),
    "messages": (("messages",),),
    "preference": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "unpaired": (("prompt", "completion", "label"),),
    "classification": (("text", "label"), ("input_ids", "label"), ("input_ids", "labels")),
    "question_answering": (
        ("question", "context", "answers"),
        ("input_ids", "start_positions", "end_positions"),
    ),
}
"""The keys that lines of each format have; a format may have several kinds of lines."""


def format_hint(format: str, fields: Mapping[str, Any]) -> str:
    """Returns the end of an error about a line: the format that has its keys.

    Empty if the line has all keys of its own format, those of none, or only keys that its own format has,
    too. The format that takes most of the line's keys is named.
    """
    own = [set(keys) for keys in _KEYS[format]]
    if any(fields.keys() >= keys for keys in own):
        return ""
    found = [
        (other, keys)
        for other, kinds in _KEYS.items()
        for keys in kinds
        if fields.keys() >= set(keys) and not any(mine >= set(keys) for mine in own)
    ]
    if not found:
        return ""
    other, keys = max(found, key=lambda each: len(each[1]))
    return f"; lines with {', '.join(map(repr, keys))} are format {other}"
