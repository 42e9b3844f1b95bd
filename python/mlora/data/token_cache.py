"""Keeps what large datasets become, so that a run, its resumes and later runs tokenise them once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa

from mlora.data.source import Source, fingerprint
from mlora.data.token_table import Samples, write_table
from mlora.errors import RunError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 4  # of tables and of how samples are made; another one is another key
_SMALL = 4 << 20  # bytes of a file that is read each time
_DAY = 86400.0  # seconds


def keeps(source: Source) -> bool:
    """Whether a source is large enough to be kept."""
    return source.size >= _SMALL


def kept_table(folder: Path, key: str, batches: Iterable[pa.RecordBatch], counts: Counter[str]) -> Samples:
    """Returns the samples of a key; those of `batches`, which are read if the folder has none.

    A table stands in the folder once it is whole.

    Args:
        folder: is made when it is needed.
        key: what `table_key` returned.
        batches: what `mlora.data.token_table.record_batches` yields.
        counts: what reading them counts; filled as it was then.

    Raises:
        RunError: the folder cannot be written.
    """
    path, noted = folder / f"{key}.arrow", folder / f"{key}.json"
    try:
        found = json.loads(noted.read_text())
        samples = Samples.of_file(path)
    except (OSError, ValueError, pa.ArrowInvalid):  # not there, or damaged
        return _written(path, noted, batches, counts)
    counts.update(found)
    return samples


def _written(path: Path, noted: Path, batches: Iterable[pa.RecordBatch], counts: Counter[str]) -> Samples:
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")  # machines may share the folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path.parent)
        if not write_table(batches, str(part)):
            return Samples()
        os.replace(part, path)
        part.write_text(json.dumps(counts))
        os.replace(part, noted)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise RunError(
            f"{path.parent}: cannot keep tokenised data: {reason}; data_cache may name another folder"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()
    return Samples.of_file(path)


def _tidy(folder: Path) -> None:
    """Removes what killed processes have left: parts to which nobody has written for a day."""
    before = time.time() - _DAY
    for part in folder.glob("*.part"):
        with suppress(OSError):
            if part.stat().st_mtime < before:
                part.unlink()


def table_key(tokenizer: PreTrainedTokenizerBase | None, *facts: object) -> str:
    """Returns a digest of a tokenizer and of all else that samples depend on."""
    digest = hashlib.sha256(repr((_VERSION, facts)).encode())
    if tokenizer is not None:
        import transformers

        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = _of_files(tokenizer) if backend is None else backend.to_str()
        special = sorted(tokenizer.special_tokens_map.items(), key=str), tokenizer.split_special_tokens
        known = type(tokenizer).__name__, tokenizer.chat_template, special, tokenizer.padding_side, words
        digest.update(repr((transformers.__version__, known)).encode())
    return digest.hexdigest()[:32]


def _of_files(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """Returns what tells a tokenizer that Python runs: its words, its files, its switches."""
    with TemporaryDirectory() as folder:
        with suppress(NotImplementedError):
            tokenizer.save_vocabulary(folder)
        files = fingerprint(folder)
    switches = sorted((key, value) for key, value in tokenizer.init_kwargs.items() if isinstance(value, bool))
    return sorted(tokenizer.get_vocab().items()), files, switches
