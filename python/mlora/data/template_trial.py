"""Tries a chat template where it can do no harm."""

from __future__ import annotations

import os
import resource
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

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
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _write_and_exit(tokenizer, writer)
    os.close(writer)
    try:
        ended = bool(select.select([reader], [], [], SECONDS)[0])
        told = os.read(reader, 1) if ended else b""
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # nothing of it is needed any more
        os.waitpid(child, 0)
    if told != b"+":
        why = f"takes more than {SECONDS:.0f} s"
        if ended:
            why = f"takes more than {MEMORY >> 20} MiB" if told else "crashes"
        raise FormatError(f"the chat template {why} for two short messages; use another one")


def _write_and_exit(tokenizer: PreTrainedTokenizerBase, writer: int) -> None:
    told = b"+"
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
        text = tokenizer.apply_chat_template(_TURNS, tokenize=False)
        told = b"+" if len(str(text)) <= LETTERS else b"-"
    except MemoryError:
        told = b"-"
    finally:  # whatever else a template raises is raised again with the data
        os.write(writer, told)
        os._exit(0)
