"""An optimizer in one file: Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
from mlora.config.config_file import resolve_config
from mlora.data.preference import Pair
from mlora.data.record import Sample
from mlora.engine.dry_run import DryStage
from mlora.engine.engine import Engine
from mlora.engine.stage_group import StageOptions
from mlora.errors import RunError
from mlora.optim import registry
from mlora.optim.optim_config import OptimConfig
from mlora.optim.optimizer import Optimizer, OptimizerError, Shapes, elements
from mlora.optim.registry import optimizer_kind, register_optimizer
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from tests.mlora.seam_runs import STAGES, data_of, train_and_resume
from tests.mlora.tiny_run import lines


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
    """Raises in the midst of a step, by default its third one."""

    fails_after = 2

    def step(self, index: Sequence[int], *arguments: Any) -> None:
        super().step(index, *arguments)
        if self.steps == self.fails_after:
            raise ZeroDivisionError("the momentum vanished.\nmore")


class FailingAtLast(Failing):
    """Raises in its last step, after which no forward comes."""

    fails_after = 5


class FailingAtFirst(Failing):
    fails_after = 0


UNSEEN: dict[str, Any] = {"eval_dataset": None, "eval_steps": None}
BEST = {"metric_for_best_model": "loss", "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("stages", "kind", "fields"),
    [
        pytest.param(1, Failing, UNSEEN, id="one stage"),
        pytest.param(1, FailingAtLast, BEST, id="one stage, best", marks=pytest.mark.nightly),
        pytest.param(2, Failing, UNSEEN, id="next batch"),
        pytest.param(2, Failing, {"eval_steps": 1}, id="evaluation", marks=pytest.mark.nightly),
        pytest.param(2, Failing, UNSEEN | {"save_steps": 1}, id="checkpoint", marks=pytest.mark.nightly),
        pytest.param(2, FailingAtLast, UNSEEN, id="end"),
        pytest.param(2, FailingAtLast, BEST, id="best", marks=pytest.mark.nightly),
    ],
)
def test_one_that_fails_stops_its_own_adapter(
    tiny_base: Path, tmp_path: Path, stages: int, kind: type[Failing], fields: dict[str, Any]
) -> None:
    """The other one trains as it does beside one that does not fail."""
    register_optimizer("failing", kind)
    register_optimizer("sound", Lion)
    shared = fields | {"lr_scheduler_type": "constant", "learning_rate": 1e-3}
    data = data_of(tiny_base, tmp_path, stages, optim="failing", **shared)
    result = mlora.train(resolve_config(data, folder=tmp_path))
    first, second = result.adapters["first"], result.adapters["second"]
    step = kind.fails_after + 1
    line = f"its optimizer (failing) failed in step {step}: ZeroDivisionError: the momentum vanished"
    best = fields is BEST
    assert first.message == line + ("; saved as it was at step 3, the best" if best else "")
    assert (first.state, second.state) == ("stopped", "finished")
    # over stages, each stage makes the step when it is asked for something else
    assert (first.step, second.step) == (step - (stages == 1), second.max_steps)
    assert (tmp_path / "run" / "adapters" / "first").exists() is best
    data["adapters"][0]["optim"] = "sound"
    mlora.train(resolve_config(data | {"output_dir": str(tmp_path / "sound")}, folder=tmp_path))
    together = [
        [one for one in lines(tmp_path / name) if one["adapter"] == "second" and one["step"] <= first.step]
        for name in ("run", "sound")
    ]
    assert together[0] == together[1]


def test_an_engine_names_the_adapter_and_goes_on(tiny_base: Path) -> None:
    """Over stages: whatever is asked first after the step raises it, and the others are not touched."""
    register_optimizer("failing", Failing)
    sample = Sample((5, 6, 7, 8), (5, 6, 7, 8))
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    fault = "adapter 'bad': its optimizer .failing. failed in step 3: ZeroDivisionError"
    with Engine(str(tiny_base), stages=2) as engine:
        engine.create_adapter("good", lora, OptimConfig(lr_scheduler_type="constant"))
        asked: list[Callable[[], object]] = [
            lambda: engine.forward_backward({"good": [sample], "bad": [sample]}),
            lambda: engine.evaluate({"good": [sample], "bad": [sample]}),
            lambda: engine.state_dict("bad"),
            lambda: engine.weights("bad"),
            lambda: engine.next_tokens({"bad": [[5, 6]]}),
        ]
        for ask in asked:
            engine.create_adapter("bad", lora, OptimConfig(optim="failing", lr_scheduler_type="constant"))
            for _ in range(3):
                engine.forward_backward({"bad": [sample]})
                engine.optim_step("bad")
            with pytest.raises(OptimizerError, match=fault):
                ask()
            assert list(engine.settle(["good", "bad"])) == ["bad"]
            with pytest.raises(OptimizerError, match=fault):
                engine.optim_step("bad")
            engine.remove_adapter("bad")
        assert engine.optim_step("good").grad_norm > 0
        assert engine.evaluate({"good": [sample]})["good"].finite


def test_an_evaluation_in_pieces_leaves_none_under_way(
    tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer of the second piece's adapter fails: the first piece has not entered then."""
    register_optimizer("failing", FailingAtFirst)
    sample = Sample((5, 6, 7, 8), (5, 6, 7, 8))
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    asked: list[Callable[[], object]] = [
        lambda: engine.evaluate({"good": [sample], "bad": [sample]}),
        lambda: engine.next_tokens({"good": [[5, 6]], "bad": [[5, 6]]}),
    ]
    with Engine(str(tiny_base), stages=2) as engine:
        monkeypatch.setattr(engine, "_cut", lambda batch, least: [{key: batch[key]} for key in batch])
        engine.create_adapter("good", lora, OptimConfig(lr_scheduler_type="constant"))
        for ask in asked:
            engine.create_adapter("bad", lora, OptimConfig(optim="failing", lr_scheduler_type="constant"))
            engine.forward_backward({"bad": [sample]})
            engine.optim_step("bad")
            with pytest.raises(OptimizerError, match="adapter 'bad': its optimizer"):
                ask()
            assert not engine._pipeline._under_way
            assert engine.idle
            engine.remove_adapter("bad")
        assert engine.evaluate({"good": [sample]})["good"].finite
        assert not engine._pipeline._results


@pytest.mark.parametrize("stages", [1, 2])
def test_one_that_fails_is_no_error_of_those_that_read_its_adapter(tiny_base: Path, stages: int) -> None:
    """Training and evaluation are alike, and a batch of the adapter itself tells the reason if asked to."""
    register_optimizer("failing", FailingAtFirst)
    sample, other = Sample((5, 6, 7, 8), (-100, 6, 7, 8)), Sample((5, 6, 9, 8), (-100, 6, 9, 8))
    lora, pair = LoraConfig(r=2, target_modules=["q_proj"]), Pair(sample, other)
    constant = OptimConfig(lr_scheduler_type="constant")
    spec = {"name": "dpo", "reference": "bad"}
    with Engine(str(tiny_base), stages=stages) as engine:
        engine.create_adapter("bad", lora, replace(constant, optim="failing"))
        engine.create_adapter("reader", lora, constant, objective=spec)
        engine.forward_backward({"bad": [sample]})
        with pytest.raises(OptimizerError) if stages == 1 else nullcontext():
            engine.optim_step("bad")
        evaluated = engine.evaluate({"reader": [pair]})["reader"]
        trained = engine.forward_backward({"reader": [pair]})["reader"]
        assert evaluated.loss == pytest.approx(trained.loss, rel=1e-6)
        assert engine.evaluate({"reader": [pair]})["reader"] == evaluated
        batch = {"bad": [sample], "reader": [pair]}
        (found,) = engine.evaluate_each([batch], raises=False)
        for results in (found, engine.finish(engine.start(batch), raises=False)):
            assert results["bad"].fault.startswith("its optimizer (failing) failed in step 1: Zero")
            assert not results["bad"].finite
            assert results["reader"].fault == ""
        for ask in (engine.discard_gradients, engine.state_dict, engine.weights):
            with pytest.raises(OptimizerError, match="adapter 'bad': its optimizer"):
                ask("bad")


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
