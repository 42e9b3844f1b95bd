"""Loads a base model whose blocks' linear weights stay on disk and are read when they are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mlora.model.checkpoint_tensors import (
    cached_path,
    files_of,
    fill,
    open_tensors,
    plain_keys,
    targets_of,
    wanted_keys,
)
from mlora.model.cut import BlockSpan, Cut, cut_model, find_blocks
from mlora.model.pretrained import refuse_missing, skeleton, told_in_one_line
from mlora.model.tensor_file import TensorFile
from mlora.offload.block_layout import BlockLayout, StoredTensor
from mlora.offload.blocks import write_block
from mlora.offload.disk import Disk
from mlora.offload.options import OffloadOptions
from mlora.offload.stream import BlockStream, stand_in
from mlora.offload.streamed_weight import StreamedWeight
from mlora_ext import MultiLoRALinear


@dataclass(frozen=True)
class Streamed:
    """The stream of a stage's blocks, and which block each of its weights belongs to, by name."""

    stream: BlockStream
    blocks: Mapping[str, int]

    def put_into(self, model: PreTrainedModel) -> None:
        """Gives the converted layers their streamed weights, in place of the stand-ins."""
        for name, block in self.blocks.items():
            layer = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(layer, MultiLoRALinear)
            layer.frozen = StreamedWeight(
                self.stream, block, name, layer.weight, transposed=layer.fan_in_fan_out
            )
            layer._parameters["weight"] = None


def load_streamed(
    source: str, span: BlockSpan | None, dtype: torch.dtype, options: OffloadOptions, *, trained: bool = False
) -> tuple[Cut, Streamed]:
    """Builds a stage, with all tensors in memory except matrices of its blocks, which have stand-ins.

    These are the linear weights, which are read from the checkpoint's own files if they have the right dtype
    there and need no conversion. Otherwise the block's weights are converted once into a scratch file, one
    block at a time. If the model is `trained`, they are all matrices, in scratch files.

    Raises:
        ValueError: the model cannot be loaded, or it cannot be cut into blocks; in one line.
        OSError: a folder for scratch files is missing or lacks room.
    """
    model = skeleton(source, dtype)
    _, count = find_blocks(model)
    cut = cut_model(model, span or BlockSpan(0, 1, 0, count))
    weights = cut.matrices() if trained else cut.linear_weights()
    if not weights:
        raise ValueError(f"base_model: {type(model).__name__} has no linear layers in its blocks")
    disk = Disk(options.folders, rate=options.rate)
    layouts: dict[int, BlockLayout] = {}
    with ExitStack() as stack:
        with told_in_one_line(source):
            files = files_of(source, getattr(model.config, "transformers_weights", None))
            wanted = wanted_keys(cut, files)
            stored = {} if trained else _stored(source, cut, wanted, files, disk)
            tensors = open_tensors(source, wanted, files, stack)
        as_they_are = {block for block, names in weights.items() if all(name in stored for name in names)}
        direct = {name for block in as_they_are for name in weights[block]}
        parts = _parts(cut, wanted, {stored[name][0] for name in direct}, set(weights) - as_they_are)
        missing = set(model.state_dict())
        for block, keys in parts.items():
            with told_in_one_line(source):
                missing &= set(fill(cut, {key: tensors[key] for key in keys}, torch.device("cpu"), dtype))
            if block is not None and missing.isdisjoint(weights[block]):
                layouts[block] = _written(model, weights[block], disk)
    refuse_missing(source, sorted(missing - direct))
    for block in as_they_are:
        layouts[block] = BlockLayout({name: stored[name][1] for name in weights[block]})
        for name in weights[block]:
            _stand_in(model, name)
    in_order = [layouts[block] for block in weights]
    places = {name: place for place, names in enumerate(weights.values()) for name in names}
    return cut, Streamed(BlockStream(in_order, disk, options.slots, poison=options.poison), places)


def _stored(
    source: str, cut: Cut, wanted: Mapping[str, str], files: Mapping[str, str], disk: Disk
) -> dict[str, tuple[str, StoredTensor]]:
    """Returns the key and the place of each weight that can be used as it lies in its file, by name."""
    expected = {name: (p.dtype, tuple(p.shape)) for name, p in cut.model.named_parameters()}
    opened: dict[str, Any] = {}
    headers: dict[str, Mapping[str, tuple[Any, ...]]] = {}
    found = {}
    for key, name in plain_keys(cut.model, files).items():
        if wanted.get(key) != key or name not in expected:
            continue
        path = files[key]
        if path not in opened:
            place = cached_path(source, path)
            if place is None:
                raise ValueError(f"the file {path} is missing")
            opened[path] = disk.open(place)
            with TensorFile(place) as file:
                headers[path] = file.places()
        offset, *kind = headers[path].get(key, (0,))
        if tuple(kind) == expected[name]:
            found[name] = key, StoredTensor(opened[path], offset, *expected[name])
    return found


def _parts(
    cut: Cut, wanted: Mapping[str, str], direct: set[str], converted: set[int]
) -> dict[int | None, list[str]]:
    """Returns the keys to load together: those of each converted block, and under None all others.

    `direct` are the keys that are not loaded.
    """
    found: dict[int | None, list[str]] = {None: []}
    targets = targets_of(cut.model, wanted, cut.model.state_dict())
    for key in wanted:
        if key in direct:
            continue
        name = targets.get(key, key)
        block: int | None = None
        if name.startswith(f"{cut.blocks}."):
            number = int(name.removeprefix(f"{cut.blocks}.").partition(".")[0])
            block = number if number in converted else None
        found.setdefault(block, []).append(key)
    return found


def _written(model: PreTrainedModel, names: Sequence[str], disk: Disk) -> BlockLayout:
    """Writes weights of a block to a scratch file, leaves stand-ins, and returns where they are."""
    layout = write_block(disk, {name: model.get_parameter(name).detach() for name in names})
    for name in names:
        _stand_in(model, name)
    return layout


def _stand_in(model: PreTrainedModel, name: str) -> None:
    """Replaces a weight, which may be on the meta device, by a stand-in."""
    module, _, key = name.rpartition(".")
    number = nn.Parameter(stand_in(model.get_parameter(name)), requires_grad=False)
    setattr(model.get_submodule(module), key, number)
