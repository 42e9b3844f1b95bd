"""Writes checkpoints while training goes on: copied between two iterations, made durable by a thread.

After Maurya et al., "DataStates-LLM: Lazy Asynchronous Checkpointing for Large Language Models", HPDC 2024.
There, copies also overlap the next forward and backward, and the optimizer's step waits for them. Adapters'
states are small: they are copied, or their copies queued on a GPU's stream, before the next batch starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mlora.store.checkpoint import save_checkpoint


class CheckpointWriter:
    """Writes checkpoints in a thread, one after the other.

    The next call raises a failure of the thread, once. As a context manager it finishes the checkpoint in
    writing and ends the thread. If the block raises an error, a failure of the thread becomes its note.

    Args:
        folder: the run's ``checkpoints``.
        keep: how many checkpoints stay.
        before: makes durable what a checkpoint counts on; called in the thread before each write.
    """

    def __init__(self, folder: Path, keep: int, before: Callable[[], object]) -> None:
        self._folder, self._keep, self._before = folder, keep, before
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlora-checkpoint")
        self._writing: futures.Future[None] | None = None

    def start(
        self, iteration: int, payload: Mapping[str, Any], adapters: Iterable[tuple[str, Mapping[str, Any]]]
    ) -> None:
        """Takes a checkpoint, and returns as soon as training may go on.

        Waits for an earlier write first, so memory holds one checkpoint. The states of `adapters` are
        copies, as ``Engine.state_dict`` gives them. They are taken one by one: a state on a GPU is on its
        way to the host before the next is made.
        """
        self.wait()
        devices: set[torch.device] = set()
        taken = _on_host(payload, devices)
        taken["adapters"] = {name: _on_host(state, devices) for name, state in adapters}
        self._writing = self._thread.submit(self._write, iteration, taken, _copied(devices))

    def check(self) -> None:
        """Raises what went wrong so far; never blocks."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint that was started is durable; RunError if it could not be written."""
        if self._writing is None:
            return
        futures.wait([self._writing])  # after an interrupt here, one can wait again
        writing, self._writing = self._writing, None
        writing.result()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writing = [] if self._writing is None else [self._writing]
        try:
            futures.wait(writing)
        finally:  # a signal may end the first wait; before Python 3.13 a thread cannot be joined once more
            futures.wait(writing)
            self._thread.shutdown()
        if error is None:
            self.wait()
        elif self._writing is not None and (failure := self._writing.exception()) is not None:
            error.add_note(f"and in the thread that writes checkpoints: {failure}")

    def _write(self, iteration: int, payload: dict[str, Any], copied: Sequence[torch.cuda.Event]) -> None:
        self._before()
        for event in copied:
            event.synchronize()
        save_checkpoint(self._folder, iteration, payload, self._keep)


def _on_host(value: Any, devices: set[torch.device]) -> Any:
    """Returns `value` in new dictionaries and lists, with its tensors on the host; adds GPUs to `devices`.

    Copies from a GPU go to pinned memory and may still be under way. Later work of the GPU, such as the next
    update, comes after them, because it is on the same stream.
    """
    if isinstance(value, Mapping):
        return {key: _on_host(entry, devices) for key, entry in value.items()}
    if isinstance(value, list):
        return [_on_host(entry, devices) for entry in value]
    if isinstance(value, Tensor) and value.is_cuda:
        devices.add(value.device)
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
    return value


def _copied(devices: Iterable[torch.device]) -> list[torch.cuda.Event]:
    """Returns events that complete when the copies from these GPUs have arrived."""
    events = []
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
