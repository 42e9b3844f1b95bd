"""A forward pass that Ctrl-C ends: torch runs no hook after it, and the model is as if it had not begun."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import CONFIGS, NAMES, converted
from torch import nn

import mlora_ext as mx

IDS = torch.arange(2, 22).view(4, 5)
LAYOUT = mx.SegmentLayout.from_lengths([20])


def interrupted(model: nn.Module, work: Callable[[], object]) -> None:
    """Do `work`, which ends with `KeyboardInterrupt` in the second decoder layer."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        handle.remove()


def forward(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS, adapter_names=NAMES).logits


def routed(model: nn.Module) -> torch.Tensor:
    with mx.route(model, LAYOUT, names=["a"]):
        return model(input_ids=IDS).logits


def generated(model: nn.Module) -> torch.Tensor:
    return model.generate(IDS, adapter_names=NAMES, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("first", [forward, routed, generated])
@pytest.mark.parametrize("then", [forward, routed, generated])
def test_next_call_is_as_if_none_was_interrupted(
    first: Callable[[nn.Module], torch.Tensor], then: Callable[[nn.Module], torch.Tensor]
) -> None:
    model = converted().eval()
    expected = then(model)
    for _ in range(2):
        interrupted(model, lambda: first(model))
        assert torch.equal(then(model), expected)
        assert model.mlora_router.active is None
        with ThreadPoolExecutor(1) as pool:
            assert torch.equal(pool.submit(then, model).result(), expected)


def test_route_around_the_interrupted_call_stays() -> None:
    model = converted().eval()
    expected = routed(model)
    with mx.route(model, LAYOUT, names=["a"]):
        interrupted(model, lambda: model(input_ids=IDS))
        assert torch.equal(model(input_ids=IDS).logits, expected)
    assert model.mlora_router.active is None
    assert model.mlora_router.thread_guard.thread is None


def test_interrupted_training_step_is_repeated_with_its_masks() -> None:
    model = converted().train()
    clone = copy.deepcopy(model)
    interrupted(model, lambda: forward(model))
    assert torch.equal(forward(model), forward(clone))
    assert model.mlora_router.step == 1


def test_only_adapter_does_not_stay_when_another_joins() -> None:
    model = converted(a=CONFIGS["a"]).eval()
    interrupted(model, lambda: model(input_ids=IDS))
    mx.add_adapter(model, "b", CONFIGS["b"])
    with pytest.raises(ValueError, match="2 adapters"):
        model(input_ids=IDS)


def test_call_inside_a_call_leaves_the_outer_one() -> None:
    """A model that calls itself is not interrupted."""
    model = converted(a=CONFIGS["a"]).eval()
    expected = model(input_ids=IDS).logits
    inner: list[torch.Tensor] = []

    def nested(*_: object) -> None:
        handle.remove()
        inner.append(model(input_ids=IDS).logits)
        assert model.mlora_router.active is not None

    handle = model.model.layers[1].register_forward_pre_hook(nested)
    assert torch.equal(model(input_ids=IDS).logits, expected)
    assert torch.equal(inner[0], expected)
    assert model.mlora_router.active is None


def test_refused_call_inside_a_call_leaves_the_outer_one() -> None:
    model = converted().eval()
    expected = forward(model)

    def refused(*_: object) -> None:
        with pytest.raises(ValueError, match="a route is already active; use adapter_names or"):
            forward(model)

    model.model.layers[1].register_forward_pre_hook(refused)
    assert torch.equal(forward(model), expected)
