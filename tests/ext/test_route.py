"""`mlora_ext.route`: packed rows, steps, refusals, and what it leaves behind."""

import copy

import pytest
import torch
from models import assert_same, converted, gradients, token_ids

import mlora_ext as mx


def test_route_is_adapter_names_and_steps_can_be_given() -> None:
    model, ids = converted().train(), token_ids(3, 5)
    expected = model(input_ids=ids, adapter_names=["b", "__base__", "a"]).logits
    layout = mx.SegmentLayout.from_lengths([5, 5, 5], adapters=[0, -1, 1])
    with mx.route(model, layout, names=["b", "a"], steps=[0, 0]):
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
        torch.testing.assert_close(model(input_ids=ids).logits, expected)
    with mx.route(model, layout, names=["b", "a"], steps=[0, 5]):
        changed = model(input_ids=ids).logits
    torch.testing.assert_close(changed[:2], expected[:2])
    assert not torch.allclose(changed[2], expected[2], atol=1e-3)


def test_route_advances_automatic_steps_between_forwards() -> None:
    model, ids = converted().train(), token_ids(1, 5)
    with mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"]):
        one, two = (model(input_ids=ids).logits for _ in range(2))
    assert not torch.allclose(one, two, atol=1e-3)


def test_route_refusals() -> None:
    model, ids = converted(), token_ids(1, 5)
    layout = mx.SegmentLayout.from_lengths([2, 2])
    with mx.route(model, layout), pytest.raises(ValueError, match="the active route has 4 rows, got x"):
        model(input_ids=ids)
    with (
        mx.route(model, layout),
        pytest.raises(
            ValueError, match=r"a route is already active; use adapter_names or mlora_ext\.route, not both"
        ),
    ):
        model(input_ids=ids, adapter_names=["a"])
    for names, steps, message in [
        (["a"], None, r"layout: expected adapters below 1 .* got 1"),
        (["a", "a"], None, "names: expected each adapter once"),
        (["a", "z"], None, "names: no adapter 'z'"),
        (["a", "b"], [1], r"steps: expected one per name \(2\), got 1"),
        (["a", "b"], 3, "steps: expected a list with one step per name, got 3"),
        ("ab", None, r"names: expected a list of adapters, got 'ab'"),
    ]:
        with pytest.raises(ValueError, match=message), mx.route(model, layout, names, steps=steps):
            pass


def test_route_without_names_leaves_the_absent_alone() -> None:
    """An adapter without rows gets no gradient, and its step between forward and backward breaks nobody."""
    model, ids = converted().train(), token_ids(1, 5)
    layout = mx.SegmentLayout.from_lengths([5, 0], adapters=[1, 0])
    with mx.route(model, layout, names=["a", "b"], steps=[3, 4]):
        model(input_ids=ids).logits.square().sum().backward()
    expected = gradients(model)
    with mx.route(model, layout, steps=[3, 4]):
        loss = model(input_ids=ids).logits.square().sum()
    with torch.no_grad():
        for parameter in mx.adapter_parameters(model, "a").values():
            parameter.add_(1)
    loss.backward()
    found = gradients(model)
    assert found.keys() == mx.adapter_parameters(model, "b").keys()
    assert_same(found, {key: expected[key] for key in found})


def test_forward_without_gradients_is_not_in_flight() -> None:
    """A route entered in training mode that saw only `no_grad` leaves nothing to be recomputed."""
    model, ids = converted().train(), token_ids(1, 5)
    layout = mx.SegmentLayout.from_lengths([5])
    with mx.route(model, layout, names=["a"]), torch.no_grad():
        model(input_ids=ids)
    assert not model.mlora_router._in_flight
    with mx.route(model, layout, names=["a"]):
        model.model(input_ids=ids)
    assert len(model.mlora_router._in_flight) == 1


def test_two_copies_do_not_meet() -> None:
    model = converted().eval()
    clone = copy.deepcopy(model)
    ids = token_ids(1, 5)
    with mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"]):
        with pytest.raises(ValueError, match="no active route"):
            clone(input_ids=ids)
        one = model(input_ids=ids).logits
    torch.testing.assert_close(clone(input_ids=ids, adapter_names=["a"]).logits, one)
