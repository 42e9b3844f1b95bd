"""AdamW on fp32 weights and moments that are out of memory, and where the new weights go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mlora_ext._C import Ticket
from torch import Tensor, nn

from mlora.offload.buffers import buffer
from mlora.offload.disk import Disk
from mlora.offload.optimizer_states import OptimizerStates, Unit
from mlora.offload.options import BUFFERS
from mlora.offload.states_on_disk import load_version, read_states, save_version, settings_of, write_states
from mlora.offload.stream import BlockStream
from mlora.offload.updates import AdamWStep, Updates, Weights

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OutOfCoreAdamW:
    """Updates Parameters in the order in which their gradients come; see `Updates`.

    Args:
        parameters: by name; they may be streamed.
        disk: holds the states if they are `on_disk`, and the streamed weights.
        on_disk: whether the states are.
        stream: of the streamed Parameters, which have the same names in its layouts.
        buffers: units under way at once.

    Attributes:
        states: fp32 weights and moments.
        counts: updates made of each Parameter.

    Raises:
        ValueError: a Parameter in memory is not contiguous, or one is not fp32, bf16 or fp16.
        OSError: a folder for scratch files is missing, or its disk lacks room.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        disk: Disk,
        *,
        on_disk: bool,
        stream: BlockStream | None = None,
        buffers: int = BUFFERS,
    ) -> None:
        self.counts = dict.fromkeys(parameters, 0)
        self._parameters, self._disk, self._stream = dict(parameters), disk, stream
        layouts = [] if stream is None else stream.layouts
        blocks = {name: block for block, layout in enumerate(layouts) for name in layout.tensors}
        self._weights = {name: self._place(name, blocks.get(name)) for name in parameters}
        numbers = {name: p.numel() for name, p in parameters.items()}
        self.states = OptimizerStates(numbers, disk, on_disk=on_disk)
        for name, parameter in parameters.items():
            weights = (
                parameter if stream is None or name not in blocks else stream.tensors(blocks[name])[name]
            )
            self.states.put(name, weights.detach())
        self._updates = Updates(self.states, self._weights, buffers=buffers)
        if stream is not None:
            stream.wait_for, stream.waits = self._updates.wait_for, self._updates.is_pending

    def submit(self, name: str, step: AdamWStep) -> None:
        """Takes a Parameter's gradient and begins its update; raises as `Updates.submit`."""
        parameter = self._parameters[name]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self.counts[name] = step.step
        self._updates.submit(name, gradient, step)

    def finish(self) -> float:
        """Waits for all updates; returns the sum of the squares of their gradients. Raises as `submit`."""
        return self._updates.finish()

    def on_span(self, hear: Callable[[str, str, int, int], None]) -> None:
        """Lets `hear` know of each read, update and write: see `Updates.on_span`."""
        self._updates.on_span = hear

    def close(self) -> None:
        """Ends its thread."""
        self._updates.close()

    def save(self, folder: str | Path, settings: Sequence[Mapping[str, Any]] = ()) -> None:
        """Writes weights, moments and counts to a folder, which holds one whole version at any time.

        Call it between steps. `settings` are kept beside them. Raises OSError if the disk lacks room; the
        version before stays then.
        """
        self._updates.finish()
        save_version(Path(folder), self.states, self.counts, settings)

    def load(self, folder: str | Path) -> list[dict[str, Any]]:
        """Takes over what `save` wrote, the weights as well, and returns the settings.

        Raises:
            OSError: a file is missing, or cannot be read.
            ValueError: it is of another model, or was damaged.
        """
        counts, states = load_version(Path(folder), self.states, self._disk)
        self._take_over(counts, states)
        return settings_of(Path(folder))

    def save_file(self, path: Path) -> int:
        """Writes weights and moments to a file; returns its CRC-32. Raises OSError; nothing is left then."""
        self._updates.finish()
        return write_states(path, self.states)

    def load_file(self, path: Path, counts: Mapping[str, int]) -> None:
        """Takes over what `save_file` wrote; raises as `load`."""
        self._take_over(counts, read_states(path, self.states, self._disk))

    def _take_over(self, counts: Mapping[str, int], states: Iterable[tuple[Unit, Tensor]]) -> None:
        for unit, weights in states:
            goal = self._weights[unit.name]
            if goal.memory is not None:
                goal.memory[unit.first : unit.first + unit.count].copy_(weights)
            else:
                assert goal.write is not None
                size = unit.count * goal.dtype.itemsize
                goal.write(unit.first, buffer(size)[:size].view(goal.dtype).copy_(weights)).wait()
        self.counts.update(counts)

    def _place(self, name: str, block: int | None) -> Weights:
        """Returns where a Parameter's new weights go: to its file, and into its slot if it is in one."""
        parameter, disk, stream = self._parameters[name], self._disk, self._stream
        if parameter.dtype not in _DTYPES:
            raise ValueError(f"optimizer: {name} is {parameter.dtype}; expected float32, bfloat16 or float16")
        if block is None or stream is None:
            if not parameter.is_contiguous():
                raise ValueError(
                    f"optimizer: the memory of {name} is not contiguous; set its data to data.contiguous()"
                )
            return Weights(parameter.detach().view(-1), parameter.dtype)
        stored = stream.layouts[block].tensors[name]

        def write(first: int, values: Tensor) -> Ticket:
            stream.write(block, name, first, values)
            return disk.write(stored.file, stored.offset + first * stored.dtype.itemsize, values)

        return Weights(None, stored.dtype, write, block)
