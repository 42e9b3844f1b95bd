"""Random Llamas: written to a disk one block at a time, or in memory, where all weights are trained.

Also whether a folder is on a disk.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from mlora.offload.offloaded_model import offloaded
from safetensors.torch import save_file
from shared.shapes import ModelShape
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = ModelShape(2048, 5632, heads=16, kv_heads=16, layers=16, vocabulary=4096)
"""1.64 GB of bf16 in its blocks; a small vocabulary, because embedding and head stay in memory."""
QUICK_SHAPE = ModelShape(64, 96, heads=4, kv_heads=4, layers=6, vocabulary=512)
DTYPE = torch.bfloat16
_IN_MEMORY = ("tmpfs", "ramfs")
_SCALE = 0.02  # standard deviation of weights


def check_disk(folder: Path) -> None:
    """Raises OSError if a folder is in memory, where reading from a disk cannot be measured."""
    kind = file_system(folder)
    if kind in _IN_MEMORY:
        raise OSError(f"{folder} is on {kind}, which is in memory; give --folder on a disk")


def file_system(folder: Path) -> str:
    """Returns the type of the file system that holds a folder, as the kernel calls it."""
    return _mount(folder)[2]


def disk_scheduler(folder: Path) -> str | None:
    """Returns the I/O scheduler of a folder's disk, such as `none`; None where the kernel does not tell."""
    found = Path("/sys/block", Path(_mount(folder)[0]).name, "queue", "scheduler")
    if not found.is_file():
        return None
    names = found.read_text().split()
    return next((name.strip("[]") for name in names if name.startswith("[")), names[0])


def _mount(folder: Path) -> list[str]:
    """Returns device, mount point and type of the file system that holds a folder."""
    place = folder.resolve()
    mounts = [line.split()[:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [mount for mount in mounts if place.is_relative_to(mount[1])]
    return max(reversed(holding), key=lambda mount: len(mount[1]))


def write_base(folder: Path, shape: ModelShape, seed: int = 0) -> int:
    """Writes a random bf16 Llama with one file per block, and drops the files from the page cache.

    One block is in memory at a time. The weights are the same for the same shape and seed.

    Returns:
        Bytes of the blocks' linear weights, which streaming leaves on the disk.
    """
    config = LlamaConfig(**shape.options, max_position_embeddings=4096, dtype=DTYPE)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    streamed = total = 0
    for file, names in _files(shapes):
        tensors = {name: _random(shapes[name], generator) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        drop_cached(folder / file)
        weight_map |= dict.fromkeys(names, file)
        total += sum(one.nbytes for one in tensors.values())
        streamed += sum(one.nbytes for name, one in tensors.items() if ".layers." in name and one.ndim == 2)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return streamed


def sizes_of(shape: ModelShape) -> str:
    """Returns a model's sizes in words."""
    return f"Llama {shape.hidden}/{shape.intermediate}, {shape.layers} blocks"


def drop_cached(path: Path) -> None:
    """Writes a file's pages to the disk and drops them from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _files(shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, list[str]]]:
    """Yields file names and the tensors in them: a file for each block, and one for all else."""
    found: dict[str, list[str]] = {}
    for name in shapes:
        _, _, block = name.partition(".layers.")
        file = f"block-{int(block.partition('.')[0]):03}" if block else "rest"
        found.setdefault(f"{file}.safetensors", []).append(name)
    yield from found.items()


def _random(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Returns random numbers for a matrix, and ones for a norm's vector."""
    if len(shape) < 2:
        return torch.ones(shape, dtype=DTYPE)
    return torch.empty(shape).normal_(0.0, _SCALE, generator=generator).to(DTYPE)


FULL_SHAPE = ModelShape(1024, 2816, heads=8, kv_heads=8, layers=16, vocabulary=4096)
"""206 million parameters in its blocks."""
QUICK_FULL = ModelShape(256, 704, heads=4, kv_heads=4, layers=4, vocabulary=512)
SEQUENCE = 256
"""Tokens of a sequence; a batch has several, so that its compute grows with its tokens."""


def random_llama(shape: ModelShape, seed: int = 0) -> LlamaForCausalLM:
    """Returns a bf16 Llama in memory, the same for the same shape and seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(**shape.options, max_position_embeddings=4096, use_cache=False)
    return LlamaForCausalLM(config).to(DTYPE).train()


def parameters_in_blocks(shape: ModelShape) -> int:
    """Returns how many parameters the matrices in the blocks have."""
    return shape.layers * sum(linear.count * linear.d_in * linear.d_out for linear in shape.linears)


def random_tokens(tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Returns `[sequences, 256]` token ids; fewer than 256 tokens make one shorter sequence."""
    length = min(SEQUENCE, tokens)
    return torch.randint(
        vocabulary, (tokens // length, length), generator=torch.Generator().manual_seed(seed)
    )


class Tuned:
    """A model that trains the same tokens at each step, its weights in memory.

    Args:
        shape: of the model.
        optimizer: whether it has one; without it, gradients are dropped after each backward pass.
        options: of `offloaded`.

    Attributes:
        losses: of all steps.
        forward, backward: seconds of the last step's passes.
    """

    def __init__(self, shape: ModelShape, *, optimizer: bool = True, **options: Any) -> None:
        self.losses: list[float] = []
        self.forward = self.backward = 0.0
        self.model = random_llama(shape)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4) if optimizer else None
        self.offloaded = offloaded(self.model, self._optimizer, base="device", **options)
        self.offloaded.__enter__()

    def step(self, ids: Tensor) -> None:
        """Trains once."""
        begin = time.perf_counter()
        loss = self.model(input_ids=ids, labels=ids).loss
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        self.forward, self.backward = middle - begin, end - middle
        if self._optimizer is None:
            self.model.zero_grad()
        else:
            self._optimizer.step()
        self.losses.append(loss.item())

    def update(self) -> None:
        """Updates all weights with gradients of ones, as after a backward pass that took no time."""
        optimizer = self.offloaded.optimizer
        assert optimizer is not None
        for name, parameter in reversed(optimizer._parameters.items()):
            parameter.grad = self._ones(parameter)
            optimizer._submit(name)
        optimizer.step()

    def _ones(self, parameter: Tensor) -> Tensor:
        """Returns a gradient; all of them share memory, so that it takes no time to fill it."""
        if not hasattr(self, "_memory"):
            most = max(each.numel() for each in self.model.parameters())
            self._memory = torch.full((most,), 1e-3, dtype=DTYPE)
        return self._memory[: parameter.numel()].view(parameter.shape)

    def close(self) -> None:
        """Ends the offloading."""
        self.offloaded.__exit__()
