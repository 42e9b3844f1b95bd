"""A layer's backward pass cannot be differentiated: second derivatives are an error, never left out."""

import pytest
import torch
from backends import BACKENDS, fixture_of
from cases import make
from peft import LoraConfig

import mlora_ext as mx
from mlora_ext.frozen.base_gemm import frozen_linear, serves
from mlora_ext.frozen.plain import PlainWeight

backend = fixture_of(BACKENDS)


def test_differentiable_once() -> None:
    case = make([4], [6], [0])
    case.dy.requires_grad_()
    (dx,) = torch.autograd.grad(mx.multi_lora_linear(*case.arguments()), case.x, case.dy, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dx.sum().backward()


def test_a_penalty_on_gradients_is_refused() -> None:
    """`torch.autograd.grad` runs only what lies on a way to its inputs; the reference computes it."""
    config = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = mx.convert_model(net, {"a": config})
    x = torch.randn(4, 8, requires_grad=True)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]

    def penalised(weight: float) -> list[torch.Tensor]:
        loss = model(x).square().mean()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in gradients)
        return list(torch.autograd.grad(loss + weight * penalty, leaves))

    with pytest.raises(RuntimeError, match="second derivatives"):
        penalised(100.0)
    with mx.use_backend("reference"):
        assert not torch.allclose(penalised(0.0)[0], penalised(100.0)[0])


def test_a_penalty_on_gradients_through_a_frozen_layer_is_refused() -> None:
    x, frozen = torch.randn(4, 8, requires_grad=True), PlainWeight.of(torch.randn(5, 8))
    (dx,) = torch.autograd.grad(frozen_linear(x, frozen).square().sum(), x, create_graph=True)
    if not serves(x):  # a plain weight on a GPU is PyTorch's own product
        assert torch.autograd.grad(dx.square().sum(), x)[0].abs().sum() > 0
        return
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(dx.square().sum(), x)
