"""What tasks need of memory: their adapters and the micro-batches that their data makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mlora.data.record import sequence_lengths
from mlora.engine.adapter_memory import AdapterMemory
from mlora.engine.memory_limit import Candidate
from mlora.planning.memory_needs import largest_lengths, with_batches_of
from mlora.tasks.task import Task
from mlora_ext.nn.interop.peft_folder import read_config

LIMIT = "scheduler.memory_limit"  # what a run's messages call it


class TaskMemory:
    """Tells an `AdapterMemory` of tasks, and remembers their largest micro-batches."""

    def __init__(self, adapters: AdapterMemory) -> None:
        self._adapters = adapters
        self._largest: dict[str, list[int]] = {}

    def know(self, task: Task) -> None:
        """Reads a task's adapter and data; raises ValueError if the adapter cannot be put on the base."""
        lora = task.lora or read_config(Path(str(task.config.init_from)))
        samples = [*task.data.samples, *(task.eval_data.samples if task.eval_data else ())]
        self._adapters.know(task.name, lora, task.optim, max(sequence_lengths(samples)))

    def largest(self, task: Task) -> list[int]:
        """Returns the sequence lengths of a task's largest micro-batch; `know` has to come first."""
        if task.name in self._largest:
            return self._largest[task.name]
        size = partial(self._adapters.size, task.name)
        found = largest_lengths(task, size)
        if size(found):  # 0 while nothing is known yet
            self._largest[task.name] = found
        return found

    def candidate(self, task: Task) -> Candidate:
        """Returns a task as an engine's memory limit sees it."""
        size = partial(self._adapters.size, task.name)
        return Candidate(
            task.name,
            self.largest(task),
            lambda count: largest_lengths(with_batches_of(task, count), size),
        )
