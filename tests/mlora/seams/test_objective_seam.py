"""An objective in one file: focal loss (Lin et al., "Focal loss for dense object detection", 2017, Eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlora
import pytest
import torch
import torch.nn.functional as F
from mlora.config.config_file import resolve_config
from mlora.engine.engine import Engine
from mlora.errors import RunError
from mlora.objectives import registry
from mlora.objectives.objective import LossOfOwner, Objective
from mlora.objectives.registry import objective_of, register_objective
from mlora.optim.optim_config import OptimConfig
from mlora.store.run_folder import read_metrics
from peft import LoraConfig
from torch import Tensor

import mlora_ext
from mlora_ext.routing.router import router_of
from tests.mlora.seam_runs import STAGES, data_of, train_and_resume
from tests.mlora.tiny_models import make, samples


class Focal(Objective):
    """`-Σ (1 - p)² log p`, divided by the number of sequences."""

    def units(self, samples: Sequence[Any], trained: int) -> int:
        return len(samples)

    def loss(self, log_p: Tensor, lengths: Sequence[int]) -> LossOfOwner:
        likely = torch.stack([own.detach().exp().mean() for own in log_p.split(list(lengths)) if len(own)])
        return LossOfOwner(focal(log_p), {"probability": likely.sum()})


def focal(log_p: Tensor) -> Tensor:
    return -((1 - log_p.exp()).square() * log_p).sum()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """For these tests only."""
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))
    register_objective("focal", Focal)


@pytest.mark.parametrize("stages", STAGES)
def test_a_run_trains_and_resumes(tiny_base: Path, tmp_path: Path, stages: int) -> None:
    """One adapter by it, in one batch with one that is trained by cross-entropy as if it were alone."""
    run = train_and_resume(data_of(tiny_base, tmp_path, stages, objective="focal"), tmp_path)
    first = [line for line in read_metrics(run / "metrics.jsonl") if line["adapter"] == "first"]
    steps, evaluations = ([line for line in first if key in line] for key in ("loss", "eval_loss"))
    assert all(0 < line["probability"] < 1 for line in steps)
    assert all(0 < line["eval_probability"] < 1 for line in evaluations)
    # it is larger by far: of all tokens of a sequence
    assert all(line["loss"] > 5 for line in steps)


@pytest.mark.parametrize("head", [False, True], ids=["frozen head", "adapter on the head"])
def test_gradients_are_those_of_autograd(head: bool) -> None:
    batch = samples(5, 11, seed=3)
    model = make("llama")
    targets = ["q_proj", "down_proj", *(["lm_head"] if head else [])]
    lora = LoraConfig(r=3, target_modules=targets, init_lora_weights=False)
    engine = Engine(model, seed=1)
    engine.create_adapter("a", lora, OptimConfig(total_steps=9), objective="focal")
    engine.create_adapter("b", lora, OptimConfig(total_steps=9))
    result = engine.forward_backward({"a": batch, "b": batch})
    names = mlora_ext.adapter_parameters(engine.model, "a")
    found = {key: p.grad.clone() for key, p in names.items()}
    router_of(engine.model).accumulates = False  # torch.autograd.grad is used
    total = torch.zeros(())
    for sample in batch:
        ids = torch.tensor([sample.input_ids])
        log_p = F.log_softmax(engine.model(input_ids=ids, adapter_names=["a"]).logits[0, :-1], -1)
        labels = torch.tensor(sample.labels[1:])
        kept = labels != -100
        total = total + focal(log_p[kept].gather(1, labels[kept][:, None]).squeeze(1))
    gradients = torch.autograd.grad(total, list(names.values()))
    assert result["a"].loss_sum == pytest.approx(float(total), rel=1e-5)
    assert result["a"].units == len(batch)
    assert result["b"].units == result["b"].tokens == result["a"].tokens
    for key, expected in zip(names, gradients, strict=True):
        torch.testing.assert_close(found[key], expected, rtol=1e-3, atol=1e-5, msg=key)


def test_a_name_is_one_objectives(tiny_base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="objective: the name 'cross_entropy' is taken"):
        register_objective("cross_entropy", Focal)
    with pytest.raises(ValueError, match="the name 'regression' is taken"):  # of a head of labels
        register_objective("regression", Focal)
    message = r"objective: must be one of cross_entropy, .*, focal or module:function, got 'best'"
    with pytest.raises(ValueError, match=message):
        objective_of("best")
    data = data_of(tiny_base, tmp_path, 1, objective="best")
    with pytest.raises(RunError, match=message):
        mlora.train(resolve_config(data, folder=tmp_path))
