"""Other tools' names for config keys, so that an error can say what the key is called here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mlora.errors import spelt_alike


class OtherTools(NamedTuple):
    """What ``aliases.yaml`` holds."""

    names: Mapping[str, Sequence[str]]  # of a key in other tools, by the key's name here
    values: Mapping[str, Mapping[str, str]]  # by their names in other tools, for each key that has such
    options: Mapping[str, str]  # of objectives, by their names in other tools
    hints: Mapping[str, str]  # for keys of other tools that are other keys here, or none
    unsupported: Sequence[str]  # keys of `TrainingArguments` that have no counterpart here


@cache
def other_tools() -> OtherTools:
    """Reads ``aliases.yaml``, once; only an error needs it."""
    import yaml

    data = yaml.safe_load(Path(__file__).with_name("aliases.yaml").read_text(encoding="utf-8"))
    return OtherTools(
        {key: names.split() for key, names in data["names"].items()},
        data["values"],
        data["options"],
        {key: each["hint"] for each in data["hints"] for key in each["keys"].split()},
        data["unsupported"].split(),
    )


def known_as(word: str, words: Sequence[str]) -> str | None:
    """Returns the word of `words` that another tool calls `word`, or None."""
    plain, names = word.lower().replace("-", "_"), other_tools().names
    return next((key for key, aliases in names.items() if plain in aliases and key in words), None)


def nearest(word: str, words: Sequence[str], what: str = "known keys") -> str:
    """Returns the end of an error line: ``did you mean 'r'?``, or ``known keys: ...`` with all `words`."""
    found = known_as(word, words) or spelt_alike(word, words)
    return f"did you mean {found!r}?" if found else f"{what}: {', '.join(words)}"
