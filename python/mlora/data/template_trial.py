"""Tries a chat template where it can do no harm."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlora.data.record import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 10.0
MEMORY = 1 << 30  # bytes beyond what the process has
LETTERS = 1 << 24  # of the text
_TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes two short messages with a tokenizer's chat template in a process of its own, under limits.

    Jinja's sandbox keeps a template from files and code. It does not keep it from asking for 10 GB of spaces
    or from never ending, and some of that cannot be interrupted or kills the process. A template that
    refuses these messages passes: it is asked again with those of the data.

    Raises:
        FormatError: it takes too long, too much memory, or ends the process.
    """
    tokens = {key: str(token) for key, token in tokenizer.special_tokens_map.items()}
    why = _fault(str(tokenizer.get_chat_template()), tuple(tokens.items()))
    if why:
        raise FormatError(f"the chat template {why} for two short messages; use another one")


@lru_cache(maxsize=64)
def _fault(template: str, tokens: tuple[tuple[str, str], ...]) -> str:
    """Returns what is wrong with a template, or nothing; each one is tried once in a process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template  # annotated as one text, but returns lists of texts and of spans
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        raise FormatError(f"the chat template cannot be tried: {error.strerror}") from error
    if child == 0:
        _write_and_exit(lambda: render([_TURNS], chat_template=template, **dict(tokens)), writer)
    os.close(writer)
    try:
        ended = bool(select.select([reader], [], [], SECONDS)[0])
        told = os.read(reader, 1) if ended else b""
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # nothing of it is needed any more
        os.waitpid(child, 0)
    if told == b"+":
        return ""
    if not ended:
        return f"takes more than {SECONDS:.0f} s"
    return f"takes more than {MEMORY >> 20} MiB" if told else "crashes"


def _write_and_exit(render: Callable[[], Any], writer: int) -> None:
    told = b"+"
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
        (text,), _ = render()
        told = b"+" if len(text) <= LETTERS else b"-"
    except MemoryError:
        told = b"-"
    finally:  # whatever else a template raises is raised again with the data
        os.write(writer, told)
        os._exit(0)
