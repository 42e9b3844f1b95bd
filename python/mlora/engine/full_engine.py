"""The engine for full tuning: one task trains all weights of the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mlora.data.micro_batch import MicroBatch
from mlora.engine.adapter_state import AdapterState
from mlora.engine.engine import Engine
from mlora.engine.full_worker import FullWorker
from mlora.objectives.registry import CROSS_ENTROPY
from mlora.optim.optim_config import OptimConfig
from mlora.optim.step_rule import LossScaler, StepRule, Update

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor


class FullEngine(Engine):
    """Trains the model's own weights, for one task at a time, with the verbs of `Engine`.

    Weights, moments and activations are where `offload` says. With `max_grad_norm: 0` each Parameter is
    updated during the backward pass of a step's last micro-batch; otherwise after it.

    Attributes:
        folder: where `state_dict` writes files of weights and moments.
    """

    _trains_base = True
    folder = Path()

    def create_adapter(
        self,
        name: str,
        lora: LoraConfig | None,
        optim: OptimConfig,
        *,
        objective: Any = CROSS_ENTROPY,
        init_from: Any = None,
        seed: int | None = None,
        replica: int = 0,
        start_batches: Any = None,
        start_weights: Any = None,
        num_labels: int | None = None,
        problem_type: str | None = None,
        label_names: Any = None,
    ) -> None:
        """Begins the task that trains the model.

        Raises ValueError if there is one already, or if anything of an adapter is given.
        """
        if self._states:
            raise ValueError(f"method: full trains one task at a time, and {next(iter(self._states))} is one")
        adapters_own = (lora, init_from, start_batches, start_weights, num_labels, problem_type, label_names)
        if any(given is not None for given in adapters_own):
            raise ValueError("method: full has no adapters; give none of their settings")
        made, spec = self._objective(name, objective)
        if made.reference is not None:
            raise ValueError(
                f"objective: compares with {made.reference}, but method: full trains the base model itself; "
                "use an objective without a reference, such as cpo, simpo or orpo"
            )
        self._part.own(name, optim)
        self._states[name] = AdapterState(
            replica, StepRule(optim), LossScaler.for_dtype(self.dtype), made, spec
        )
        self.memory_after = []

    def state_dict(self, name: str) -> dict[str, Any]:
        """Writes weights and moments to a file in `folder`, and returns its name and all counts.

        Raises OSError if the file cannot be written.
        """
        adapter = self._states.at_rest(name)
        self._flush(name)
        file = full_file(name, adapter.steps)
        path = self.folder / file
        (saved,) = self._control(FullWorker.save_state, name, file=str(path))
        (state,) = self._control(FullWorker.state, name)
        return {**state, **adapter.state_dict(), **saved, "file": file, "bytes": path.stat().st_size}

    def load_state_dict(self, name: str, state: Mapping[str, Any]) -> None:
        """Continues the task from `state_dict`.

        Raises:
            ValueError: the file is missing, is of another model or was damaged.
        """
        path = self.folder / state["file"]
        tensors = {"file": str(path), "counts": state["counts"], "gradients": state["gradients"]}
        try:
            self._control(FullWorker.load, name, updates=state["updates"], seed=0, state=tensors)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        self._states.of(name).load_state_dict(state)

    def remove_adapter(self, name: str) -> None:
        """Ends the task; the model keeps its weights."""
        self._flush(name)
        self._control(FullWorker.remove, name)
        del self._states[name]
        self.memory_after = []

    def close(self) -> None:
        """Ends the task and the pipeline; the model keeps its weights."""
        self._end_task()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with suppress(OSError, FloatingPointError):  # of an update that was under way
                self._end_task()
        super().__exit__(kind, error, trace)

    def _end_task(self) -> None:
        """Ends the thread and drops the scratch files of the optimizer."""
        for name in list(self._states):
            self._part.remove(name)
            del self._states[name]

    def save(
        self, name: str, folder: str | os.PathLike[str], weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Writes the model as a Transformers folder. Raises OSError if it cannot be written."""
        self._flush(name)
        self._pipeline.control(FullWorker.export, {"folder": os.fspath(folder)})

    def _planned(self, ends: Sequence[str], packed: Sequence[MicroBatch]) -> dict[str, Update]:
        found = {}
        for name in ends:
            state = self._states[name]
            units = state.units + sum(batch.units.get(name, 0) for batch in packed)
            update = state.rule.planned(units * state.scaler.scale)
            if update is not None:
                found[name] = update
        return found


def full_file(name: str, step: int) -> str:
    """Returns the file name of a model's weights and moments after `step` optimizer steps."""
    return f"{name}.full-{step:08d}.bin"
