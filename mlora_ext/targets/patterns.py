"""Refuses regular expressions that a model's names would keep busy for ever, before PEFT matches them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import nn

from ..errors import AdapterError

if TYPE_CHECKING:
    from peft import LoraConfig

_TRIAL = """
import json, re, resource, sys, time
for number, (how, pattern) in enumerate(json.load(sys.stdin)):
    if number == 0:
        keys = pattern
        continue
    print(number, flush=True)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 2,) * 2)
    find = getattr(re.compile(pattern), how)
    for key in keys:
        find(key)
"""


def check_patterns(modules: Iterable[tuple[str, nn.Module]], name: str, config: LoraConfig) -> None:
    """Raises ValueError for a pattern of a config that is none, or that takes seconds on a model's names.

    Python's `re` cannot be interrupted, and holds the GIL. So patterns with several repeats or alternatives,
    which may backtrack, are first matched in a process of their own, for one or two seconds of CPU time.
    `modules` are the base's, by name: what adapters add would make each call's names new.
    """
    patterns = list(_patterns(config))
    for field, given, _, whole in patterns:
        try:
            re.compile(whole)
        except (re.error, RecursionError, OverflowError) as error:
            raise AdapterError(name, f"{field}: {given!r} is not a pattern: {error}") from error
    risky = [one for one in patterns if len(re.findall(r"[*+?{|]", one[1])) > 1]
    if not risky:
        return
    keys = []
    for key, module in modules:
        keys += [key, *(f"{key}.{own}" for own, _ in module.named_parameters(recurse=False))]
    slow = _too_slow(tuple(keys), tuple((how, whole) for *_, how, whole in risky))
    if slow is not None:
        field, given, *_ = risky[slow]
        raise AdapterError(
            name,
            f"{field}: {given!r} takes too long to match this model's names; write it "
            "without a repeat inside a repeat, such as (a+)+",
        )


def _patterns(config: LoraConfig) -> Iterator[tuple[str, str, str, str]]:
    """Yields each pattern: its field, as it is written, PEFT's function of `re`, and what that is given."""
    for field in ("target_modules", "exclude_modules"):
        if isinstance(value := getattr(config, field), str):
            yield field, value, "fullmatch", value
    for one in config.modules_to_save or ():
        yield "modules_to_save", one, "match", rf"(^|.*\.){one}($|\..*)"
    value = config.layers_pattern or []
    for one in [value] if isinstance(value, str) else value:
        yield "layers_pattern", one, "match", rf"(?:^|.*?\.){one}\.(?P<idx>\d+)\."
    for field in ("rank_pattern", "alpha_pattern"):
        for one in getattr(config, field) or ():
            yield field, one, "match", rf"(.*\.)?({one})$"


@lru_cache(maxsize=64)
def _too_slow(keys: tuple[str, ...], patterns: tuple[tuple[str, str], ...]) -> int | None:
    """Returns the place of the first pattern that is still matching the keys at its limit, or None."""
    told = json.dumps([("", keys), *patterns])
    command = [sys.executable, "-I", "-S", "-c", _TRIAL]
    done = subprocess.run(command, input=told, stdout=subprocess.PIPE, encoding="ascii", check=False)
    # without a number the process could not start, and PEFT matches the patterns as they are
    begun = done.stdout.split()
    limited = done.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    return int(begun[-1]) - 1 if limited and begun else None
