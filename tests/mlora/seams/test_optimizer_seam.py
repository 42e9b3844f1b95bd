"""An optimizer in one file: Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.engine.dry_run import DryStage
from mlora.engine.stage_group import StageOptions
from mlora.errors import RunError
from mlora.optim import registry
from mlora.optim.optim_config import OptimConfig
from mlora.optim.optimizer import Optimizer, Shapes, elements
from mlora.optim.registry import optimizer_kind, register_optimizer
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from tests.mlora.seam_runs import STAGES, data_of, train_and_resume


class Lion(Optimizer):
    """Steps by the sign of a mixture of the momentum and the gradient; its state is the momentum."""

    def begin(self) -> None:
        if not any(self.state):
            self.state = [[torch.zeros_like(p)] for p in self.parameters]

    def step(
        self,
        index: Sequence[int],
        gradients: Sequence[Tensor],
        learning_rate: float,
        scale: float,
        steps: int,
    ) -> None:
        for i, gradient in zip(index, gradients, strict=True):
            gradient.mul_(scale)
            (momentum,) = self.state[i]
            direction = momentum.lerp(gradient, 1 - self.config.adam_beta1).sign_()
            self.parameters[i].add_(direction, alpha=-learning_rate)
            momentum.lerp_(gradient, 1 - self.config.adam_beta2)

    @staticmethod
    def state_bytes(shapes: Shapes) -> int:
        return 4 * elements(shapes)


@pytest.fixture(autouse=True)
def lion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered for these tests only."""
    monkeypatch.setattr(registry, "_OPTIMIZERS", dict(registry._OPTIMIZERS))
    register_optimizer("toy_lion", Lion)


@pytest.mark.parametrize("stages", STAGES)
def test_it_trains_and_resumes(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    data = data_of(
        tiny_base, tmp_path, stages, optim="toy_lion", learning_rate=1e-3, lr_scheduler_type="constant"
    )
    run = train_and_resume(data, tmp_path)
    # B begins at zero and each step moves each of its elements by the learning rate
    tensors = load_file(run / "adapters" / "first" / "adapter_model.safetensors")
    moved = torch.cat([t.flatten() for key, t in tensors.items() if "lora_B" in key]) / 1e-3
    assert torch.allclose(moved, moved.round(), atol=1e-3)
    assert moved.abs().max() > 1


class Failing(Lion):
    """Raises in the midst of its third step."""

    def step(self, index: Sequence[int], *arguments: Any) -> None:
        super().step(index, *arguments)
        if self.steps == 2:
            raise ZeroDivisionError("the momentum vanished.\nmore")


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_one_that_fails_stops_its_own_adapter(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    """With several stages it ends the run, and the error names the adapter."""
    register_optimizer("failing", Failing)
    data = data_of(tiny_base, tmp_path, stages, optim="failing", lr_scheduler_type="constant")
    line = "its optimizer (failing) failed in step 3: ZeroDivisionError: the momentum vanished"
    if stages == 2:
        with pytest.raises(RunError, match=re.escape(f"adapter 'first': {line}")):
            mlora.train(resolve_config(data, folder=tmp_path))
        return
    result = mlora.train(resolve_config(data, folder=tmp_path))
    first, second = result.adapters["first"], result.adapters["second"]
    assert (first.state, first.message, second.state) == ("stopped", line, "finished")
    assert (first.step, second.step) == (2, second.max_steps)


def test_its_state_counts_in_the_memory_that_a_task_needs(tiny_base: Path) -> None:
    stage = DryStage(str(tiny_base), StageOptions(torch.device("cpu"), torch.float32))
    lora = LoraConfig(r=4, target_modules=["q_proj"])
    lion, adamw = (stage.states(lora, OptimConfig(optim=name)) for name in ("toy_lion", "adamw_torch_fused"))
    assert (lion.moments, lion.update) == (adamw.moments // 2, 0)
    assert (lion.weights, lion.gradients) == (adamw.weights, adamw.gradients)


def test_a_name_is_one_optimizers(tiny_base: Path, tmp_path: Path) -> None:
    register_optimizer("toy_lion", Lion)
    with pytest.raises(ValueError, match="optim: the name 'sgd' is taken"):
        register_optimizer("sgd", Lion)
    with pytest.raises(ValueError, match=r"optim: expected one of adamw_torch, .*toy_lion.*, got 'tiger'"):
        optimizer_kind("tiger")
    data = data_of(tiny_base, tmp_path, 1, optim="tiger")
    with pytest.raises(RunError, match=r"optim: must be one of .*sgd.*toy_lion, got 'tiger'"):
        mlora.train(resolve_config(data, folder=tmp_path))
