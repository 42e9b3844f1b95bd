"""Writes a trained model as a Transformers folder, one block at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from mlora.durable import sync_path, temporary
from mlora.model.base_model import BaseModel

SHARD = 128 << 20
"""Bytes after which a file of weights is full; so much of what is on disk is in memory at once."""


def export_model(base: BaseModel, folder: Path) -> None:
    """Writes config and weights; `from_pretrained` loads the folder, also with other numbers of shards.

    The folder appears when it is whole and on the disk. Raises OSError if it cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = temporary(folder)
    scratch.mkdir()
    try:
        _write(base, scratch)
        for path in (*scratch.iterdir(), scratch):
            sync_path(path)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
        sync_path(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # it is there after an error only


def _write(base: BaseModel, scratch: Path) -> None:
    base.model.config.save_pretrained(scratch)
    if base.model.generation_config is not None:
        base.model.generation_config.save_pretrained(scratch)
    places: dict[str, str] = {}
    shards = list(_write_shards(base, scratch))
    for number, names in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.replace(scratch / f"{number}.safetensors", scratch / name)
        places |= dict.fromkeys(names, name)
    total = sum((scratch / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (scratch / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_shards(base: BaseModel, folder: Path) -> Iterator[list[str]]:
    """Writes `1.safetensors` and so on; yields the names of the weights in each."""
    shard: dict[str, Tensor] = {}
    number = 1
    for name, tensor in _weights(base):
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD:
            _save(shard, folder / f"{number}.safetensors")
            yield list(shard)
            shard, number = {}, number + 1
        shard[name] = tensor
    _save(shard, folder / f"{number}.safetensors")
    yield list(shard)


def _save(shard: dict[str, Tensor], path: Path) -> None:
    """Writes a file of weights, and lets the page cache go: it counts where memory is limited."""
    save_file(shard, path, {"format": "pt"})
    sync_path(path)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _weights(base: BaseModel) -> Iterator[tuple[str, Tensor]]:
    """Yields each weight that a checkpoint holds, once; those on disk as copies."""
    layouts = [] if base.stream is None else base.stream.layouts
    blocks = {name: block for block, layout in enumerate(layouts) for name in layout.tensors}
    named = dict(base.model.named_parameters())  # a tied weight under its first name only
    kept = base.model.state_dict().keys()
    for name, tensor in (*named.items(), *base.model.named_buffers()):
        if name in blocks:
            assert base.stream is not None
            yield name, base.stream.tensors(blocks[name])[name].clone()
        elif name in kept:
            yield name, tensor.detach().contiguous()
