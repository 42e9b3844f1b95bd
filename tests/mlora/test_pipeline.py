"""The pipeline runs anyone's modules."""

import pytest
import torch
from mlora.pipeline import Pipeline
from torch import Tensor, nn


def mean_square(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    loss = (output - target).square().mean()
    return loss, loss.item()


def test_one_stage_trains_any_module() -> None:
    module, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(module.state_dict())
    pipeline = Pipeline([module], "lorapp", mean_square)
    batches = [(torch.randn(4, 5), torch.randn(4, 3)) for _ in range(3)]
    for x, target in batches:
        pipeline.submit({"input": x}, target)
    reports = pipeline.step()
    expected = [mean_square(twin(x), target) for x, target in batches]
    sum(loss for loss, _ in expected).backward()
    assert reports == [report for _, report in expected]
    torch.testing.assert_close(module.weight.grad, twin.weight.grad)
    assert pipeline.step() == []


def test_forward_only_leaves_no_gradient() -> None:
    module = nn.Linear(5, 3)
    pipeline = Pipeline([module], "gpipe", mean_square)
    pipeline.submit({"input": torch.randn(4, 5)}, torch.randn(4, 3), train=False)
    assert len(pipeline.step()) == 1
    assert module.weight.grad is None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="pipelines of 1 stage, got 2"):
        Pipeline([nn.Linear(1, 1), nn.Linear(1, 1)], "lorapp", mean_square)
    with pytest.raises(ValueError, match="expected one of lorapp, 1f1b, gpipe, got 'pipedream'"):
        Pipeline([nn.Linear(1, 1)], "pipedream", mean_square)
    pipeline = Pipeline([nn.Linear(1, 1)], "1f1b", mean_square)
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.submit({"input": torch.zeros(1, 1)}, torch.zeros(1, 1))
