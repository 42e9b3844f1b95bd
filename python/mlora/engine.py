"""The engine: adapters over one base model, their gradients and their optimizer steps."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import mlora_ext
from mlora.loss import chunked_losses, plain_losses
from mlora.model import BaseModel, PackedStage, load_base
from mlora.optimizer import AdapterOptimizer, OptimConfig
from mlora.packing import BASE, PackedBatch, pack
from mlora.pipeline import Pipeline
from mlora.scaler import LossScaler
from mlora_ext import gemm
from mlora_ext.nn.routing import router_of

if TYPE_CHECKING:
    from peft import LoraConfig

    from mlora.data import Sample


@dataclass(frozen=True)
class BatchResult:
    """An adapter's share of a micro-batch.

    Attributes:
        loss_sum: sum of its token losses.
        tokens: number of its trained tokens.
        finite: whether `loss_sum` is a number.
    """

    loss_sum: float
    tokens: int
    finite: bool


@dataclass(frozen=True)
class StepResult:
    """An adapter's optimizer step.

    Attributes:
        step: optimizer steps so far, this one included, skipped or not.
        learning_rate: that of this step.
        grad_norm: norm of the mean gradient before clipping.
        skipped: whether the loss scaler skipped the step after an overflow, and lowered its scale.
        finite: whether the gradient was finite; if not, the weights are as before.
    """

    step: int
    learning_rate: float
    grad_norm: float
    skipped: bool
    finite: bool


@dataclass(eq=False)
class _Adapter:
    """What the engine keeps for an adapter beside its weights."""

    optimizer: AdapterOptimizer
    scaler: LossScaler
    steps: int = 0
    tokens: int = 0
    rows: int = 0


class Engine:
    """Trains many adapters over one frozen base model, in batches that they share.

    Accumulating and stepping are separate: call `forward_backward` once or several times, then `optim_step`
    for each adapter whose batch is complete. Nothing that happens to an adapter depends on the others.

    Args:
        base_model: a folder, a hub id, or a Transformers model, which is converted in place.
        device: where to train.
        dtype: of the base's weights; adapters are fp32.
        fp16: short for `dtype=torch.float16`, which brings a dynamic loss scaler per adapter.
        gradient_checkpointing: recompute blocks in backward instead of keeping their activations.
        pack_base: keep the frozen weights packed for oneDNN too, on a CPU: faster, for three times their
            memory.
        seed: initial weights and dropout of an adapter derive from it and the adapter's name.

    Raises:
        ValueError: if the model cannot be loaded, or cannot be trained on packed rows.

    Example:
        >>> engine = Engine("path/to/base")
        >>> engine.create_adapter("a", LoraConfig(r=8), OptimConfig(learning_rate=1e-4, total_steps=100))
        >>> engine.forward_backward({"a": samples})
        >>> engine.optim_step("a")
    """

    def __init__(
        self,
        base_model: str | os.PathLike[str] | PreTrainedModel,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        fp16: bool = False,
        gradient_checkpointing: bool = False,
        pack_base: bool = False,
        seed: int = 0,
    ) -> None:
        if fp16 and dtype is torch.float32:
            dtype = torch.float16
        if fp16 and dtype is not torch.float16:
            raise ValueError(f"fp16: expected dtype torch.float16 beside it, got {dtype}")
        self.device, self.dtype, self.seed = torch.device(device), dtype, seed
        source = base_model if isinstance(base_model, PreTrainedModel) else os.fspath(base_model)
        self._base: BaseModel = load_base(source, self.device, dtype)
        self.model = self._base.model
        router_of(self.model).accumulates = True
        if gradient_checkpointing:
            self._base.checkpoint_activations()
        if pack_base:
            self._base.pack_weights()
        self._adapters: dict[str, _Adapter] = {}
        self._pipeline = Pipeline([PackedStage(self._base)], "lorapp", self._losses)

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters, in the order in which they were created."""
        return list(self._adapters)

    @property
    def base_gemm(self) -> str | None:
        """The library that multiplies by the frozen weights on a CPU, measured unless it was set.

        Rounding depends on it. It is the process's, by dtype; on other devices there is no choice.

        Raises:
            ValueError: on setting one that does not serve this model here.
        """
        return gemm.chosen(self.dtype).get(_name(self.dtype)) if self.device.type == "cpu" else None

    @base_gemm.setter
    def base_gemm(self, library: str) -> None:
        if self.device.type != "cpu":
            raise ValueError(f"base_gemm: there is no choice on {self.device}, got {library!r}; leave it out")
        gemm.choose({_name(self.dtype): library})

    def create_adapter(
        self,
        name: str,
        lora: LoraConfig | None,
        optim: OptimConfig,
        *,
        init_from: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        """Put a new adapter on the base.

        Args:
            name: of the adapter.
            lora: PEFT's config; None = that of `init_from`.
            optim: its optimizer and schedule.
            init_from: a PEFT folder with initial weights; default: PEFT's random initialisation.
            seed: of initial weights and dropout, together with the name; default: the engine's.

        Raises:
            ValueError: if the name is taken, a config is not supported, targets match nothing, or the folder
                does not fit.
        """
        if name in self._adapters:
            raise ValueError(f"adapter {name!r}: the engine has an adapter of this name")
        if lora is None and init_from is None:
            raise ValueError(f"adapter {name!r}: expected lora or init_from, got neither")
        seed = self.seed if seed is None else seed
        if lora is not None:
            mlora_ext.add_adapter(self.model, name, lora, seed=seed)
        if init_from is not None:
            try:
                mlora_ext.load_adapter(self.model, name, init_from, seed=seed)
            except ValueError:
                if lora is not None:
                    mlora_ext.remove_adapter(self.model, name)
                raise
        try:
            optimizer = AdapterOptimizer(self._parameters(name), optim)
        except ValueError:
            mlora_ext.remove_adapter(self.model, name)
            raise
        self._adapters[name] = _Adapter(optimizer, LossScaler.for_dtype(self.dtype))

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter, its gradients and its optimizer.

        Raises:
            ValueError: if there is no adapter of this name.
        """
        self._get(name)
        mlora_ext.remove_adapter(self.model, name)
        del self._adapters[name]

    def forward_backward(self, batches: Mapping[str, Sequence[Sample]]) -> dict[str, BatchResult]:
        """Run one micro-batch and add each adapter's gradient, a sum over its tokens, to what it has.

        Args:
            batches: samples by adapter name.

        Returns:
            By adapter name. A loss that is not finite spoils that adapter's gradient only; call
            `discard_gradients` or `remove_adapter` for it.

        Raises:
            ValueError: if a name is unknown, or a sample is malformed.
        """
        for name in batches:
            self._get(name)
        batch = self._pack(batches, {name: self._adapters[name].rows for name in batches})
        results = self._run(batch, train=True)
        for name, rows in zip(batch.names, batch.layout.lengths, strict=True):
            adapter = self._adapters[name]
            adapter.rows += rows
            adapter.tokens += results[name].tokens
        return results

    def evaluate(self, batches: Mapping[str | None, Sequence[Sample]]) -> dict[str, BatchResult]:
        """Losses without gradients or dropout.

        Args:
            batches: samples by adapter name; None or `__base__` is the base model alone.

        Returns:
            By name; `__base__` for the base model.

        Raises:
            ValueError: if a name is unknown, or a sample is malformed.
        """
        for name in batches:
            if name not in (None, BASE):
                self._get(str(name))
        return self._run(self._pack(batches, None), train=False)

    def optim_step(self, name: str) -> StepResult:
        """Step an adapter's optimizer on the mean gradient over the tokens that it has accumulated.

        Args:
            name: of the adapter.

        Returns:
            What was done; the gradients are gone.

        Raises:
            ValueError: if there is no such adapter, or it has accumulated no trained token.
        """
        adapter = self._get(name)
        if adapter.tokens == 0:
            raise ValueError(f"adapter {name!r}: has no gradient; call forward_backward first")
        done = adapter.optimizer.step(adapter.tokens * adapter.scaler.scale)
        skipped = adapter.scaler.update(overflow=not done.taken)
        adapter.steps += 1
        adapter.tokens = adapter.rows = 0
        return StepResult(adapter.steps, done.learning_rate, done.grad_norm, skipped, done.taken)

    def discard_gradients(self, name: str) -> None:
        """Forget what an adapter has accumulated since its last step.

        Raises:
            ValueError: if there is no adapter of this name.
        """
        adapter = self._get(name)
        adapter.optimizer.drop_gradients()
        adapter.tokens = adapter.rows = 0

    def state_dict(self, name: str) -> dict[str, Any]:
        """Everything that continues an adapter bit for bit, as copies; also in the middle of an accumulation.

        Raises:
            ValueError: if there is no such adapter.
        """
        adapter = self._get(name)
        weights = mlora_ext.adapter_parameters(self.model, name)
        gradients = {key: p.grad.contiguous().clone() for key, p in weights.items() if p.grad is not None}
        return {
            "gradients": gradients,
            "tokens": adapter.tokens,
            "rows": adapter.rows,
            "weights": {key: p.detach().contiguous().clone() for key, p in weights.items()},
            "optimizer": adapter.optimizer.state_dict(),
            "scaler": asdict(adapter.scaler),
            "steps": adapter.steps,
            "dropout_seed": router_of(self.model).adapters[name].seed,
        }

    def load_state_dict(self, name: str, state: Mapping[str, Any]) -> None:
        """Continue an adapter, created with the same configs, from `state_dict`.

        Raises:
            ValueError: if there is no such adapter, or the state is that of another one.
        """
        adapter = self._get(name)
        weights = mlora_ext.adapter_parameters(self.model, name)
        shapes = {key: list(p.shape) for key, p in weights.items()}
        if {key: list(tensor.shape) for key, tensor in state["weights"].items()} != shapes:
            raise ValueError(f"adapter {name!r}: the state is that of an adapter with other layers or ranks")
        adapter.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for key, parameter in weights.items():
                parameter.copy_(state["weights"][key])
        adapter.scaler = LossScaler(**state["scaler"])
        adapter.steps = state["steps"]
        adapter.tokens, adapter.rows = state["tokens"], state["rows"]
        adapter.optimizer.drop_gradients()
        for key, gradient in state["gradients"].items():
            weights[key].grad = torch.empty_like(weights[key]).copy_(gradient)
        router_of(self.model).adapters[name].seed = state["dropout_seed"]

    def save(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Write an adapter as a PEFT folder.

        Raises:
            ValueError: if there is no adapter of this name.
            OSError: if the folder cannot be written.
        """
        self._get(name)
        mlora_ext.save_adapter(self.model, name, folder)

    def load(self, name: str, folder: str | os.PathLike[str], optim: OptimConfig) -> None:
        """Create an adapter from a PEFT folder: its config and weights, with a fresh optimizer.

        Raises:
            ValueError: as `create_adapter`.
        """
        self.create_adapter(name, None, optim, init_from=folder)

    def close(self) -> None:
        """End the pipeline; the model stays usable."""
        self._pipeline.close()

    def _get(self, name: str) -> _Adapter:
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise ValueError(f"no adapter {name!r} in this engine; its adapters: {known}")
        return self._adapters[name]

    def _parameters(self, name: str) -> list[torch.nn.Parameter]:
        return list(mlora_ext.adapter_parameters(self.model, name).values())

    def _pack(self, batches: Mapping[Any, Sequence[Sample]], row0: Mapping[str, int] | None) -> PackedBatch:
        return pack(batches, row0=row0, vocab_size=self._base.vocab_size, device=self.device)

    def _run(self, batch: PackedBatch, *, train: bool) -> dict[str, BatchResult]:
        if not batch.rows.numel():
            return {name: BatchResult(0.0, 0, True) for name in batch.names}
        if self.model.training is not train:
            self.model.train(train)
        steps = tuple(self._adapters[name].steps for name in batch.adapters)
        self._pipeline.submit({"batch": batch, "steps": steps}, batch, train=train)
        with self._base.packed():
            (sums,) = self._pipeline.step()
        losses = sums.tolist()
        return {
            name: BatchResult(loss, batch.tokens[name], math.isfinite(loss))
            for name, loss in zip(batch.names, losses, strict=True)
        }

    def _losses(self, output: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """The pipeline's loss: scaled total to differentiate, and the sums per owner."""
        counts = [batch.tokens[name] for name in batch.names]
        scales = [1.0 if name == BASE else self._adapters[name].scaler.scale for name in batch.names]
        head = self._base.frozen_head()
        if head is not None:
            return chunked_losses(output, head, batch.rows, batch.targets, counts, scales)
        logits = output.index_select(0, batch.rows)
        return plain_losses(logits, batch.targets, counts, scales)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
