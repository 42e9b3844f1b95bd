"""Checkpoints written while training goes on: copied between two iterations, made durable by a thread.

After Maurya et al., "DataStates-LLM: Lazy Asynchronous Checkpointing for Large Language Models", HPDC 2024.
There the copies, too, run behind the next forward and backward, and the optimizer's step waits for them. The
states of adapters are small: their copies are made, or on a GPU's stream, before the next batch starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from mlora.files.checkpoint import save_checkpoint


class CheckpointWriter:
    """Writes checkpoints in a thread, one after the other.

    What goes wrong there is raised once, by the next call. As a context manager it leaves no thread behind,
    and the checkpoint in writing is whole or was told of; an error inside is not hidden by one of the thread,
    which becomes its note.

    Args:
        folder: the run's ``checkpoints``.
        keep: how many checkpoints stay.
        before: makes durable what a checkpoint counts on, before there is one; called in the thread.

    Example:
        >>> with CheckpointWriter(folder.checkpoints, keep=2, before=metrics.sync) as writer:
        ...     writer.start(10, {"iteration": 10}, [("a", engine.state_dict("a"))])
        ...     writer.wait()
    """

    def __init__(self, folder: Path, keep: int, before: Callable[[], object]) -> None:
        self._folder, self._keep, self._before = folder, keep, before
        self._thread = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlora-checkpoint")
        self._writing: futures.Future[None] | None = None

    def start(
        self, iteration: int, payload: Mapping[str, Any], adapters: Iterable[tuple[str, Mapping[str, Any]]]
    ) -> None:
        """Take a checkpoint, and return as soon as training may go on.

        A checkpoint that is still being written is waited for first, so there is one of them in memory.

        Args:
            iteration: how many iterations the run has made; names the file.
            payload: tensors and plain values.
            adapters: names and states, whose tensors are copies, as ``Engine.state_dict`` gives them. They
                are taken one by one: what a state has on a GPU is on its way to the host before the next.

        Raises:
            RunError: the checkpoint before could not be written.
        """
        self.wait()
        devices: set[torch.device] = set()
        taken = _on_host(payload, devices)
        taken["adapters"] = {name: _on_host(state, devices) for name, state in adapters}
        self._writing = self._thread.submit(self._write, iteration, taken, _copied(devices))

    def check(self) -> None:
        """Raise what went wrong so far; returns at once.

        Raises:
            RunError: a checkpoint could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that was started is durable.

        Raises:
            RunError: it could not be written.
        """
        if self._writing is None:
            return
        futures.wait([self._writing])  # an interrupt here leaves it to be waited for
        writing, self._writing = self._writing, None
        writing.result()

    def __enter__(self) -> CheckpointWriter:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait, and end the thread."""
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
    """`value` in new dictionaries and lists, so that nobody changes them, its tensors on the host.

    Copies from a GPU are under way when this returns, to pinned memory. What the GPU is asked for later, such
    as the next update, comes after them: they are on the same stream.

    Args:
        value: plain values, tensors, and dictionaries and lists of them.
        devices: GPUs that copies come from are added.
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
    """Events that come when the copies from these GPUs are there."""
    events = []
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events
