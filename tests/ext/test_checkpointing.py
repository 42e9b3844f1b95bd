"""Activation checkpointing: recomputation goes along the route of the forward pass that it repeats."""

import copy

import pytest
import torch
from models import CONFIGS, NAMES, assert_same, converted, gradients, token_ids
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

import mlora_ext as mx


@pytest.mark.parametrize("reentrant", [True, False])
def test_transformers_checkpointing(reentrant: bool) -> None:
    """Recomputation draws the masks of the forward pass it repeats, and advances nothing."""
    model, ids = converted().train(), token_ids(4, 7)
    layout = mx.SegmentLayout.from_lengths([7, 14, 7], adapters=[1, 0, -1])

    def two_steps() -> list[dict[str, torch.Tensor]]:
        model.mlora_router.step = 0
        found = []
        for _ in range(2):
            model(input_ids=ids, adapter_names=NAMES).logits.square().sum().backward()
            found.append(gradients(model))
        with mx.route(model, layout, names=["a", "b"]):
            loss = model(input_ids=ids).logits.square().sum()
        loss.backward()
        found.append(gradients(model))
        with mx.route(model, layout, names=["a", "b"]):
            model(input_ids=ids).logits.square().sum().backward()
        return [*found, gradients(model)]

    expected = two_steps()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for one, other in zip(two_steps(), expected, strict=True):
        assert_same(one, other)
    assert model.mlora_router.step == 4


def two_forwards_backward_reversed(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.mlora_router.step = 0
    names = [NAMES, NAMES[::-1]] if len(model.mlora_router.adapters) > 1 else [["a"] * 4] * 2
    losses = [model(input_ids=ids, adapter_names=each).logits.square().sum() for each in names]
    for loss in reversed(losses):
        loss.backward()
    return gradients(model)


def retained_backward_after_another_forward(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.mlora_router.step = 0
    logits = model(input_ids=ids, adapter_names=["a"] * 4).logits
    logits[..., 0].sum().backward(retain_graph=True)
    model.zero_grad()
    other = model(input_ids=ids, adapter_names=["a"] * 4).logits
    logits[..., 1].sum().backward()
    del other
    return gradients(model)


def backward_after_two_dropped_forwards(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.mlora_router.step = 0
    logits = model(input_ids=ids, adapter_names=["a"] * 4).logits
    for _ in range(2):
        other = model(input_ids=ids, adapter_names=["a"] * 4).logits
    del other
    logits.square().sum().backward()
    return gradients(model)


def one_backward_of_two_forwards(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.mlora_router.step = 0
    losses = [model(input_ids=ids, adapter_names=["a"] * 4).logits.square().sum() for _ in range(2)]
    (losses[0] + losses[1]).backward()
    return gradients(model)


PATTERNS = [
    two_forwards_backward_reversed,
    retained_backward_after_another_forward,
    backward_after_two_dropped_forwards,
    one_backward_of_two_forwards,
]


@pytest.mark.parametrize("adapters", [1, 2])
@pytest.mark.parametrize("enable", ["activation", "gradient"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_checkpointing_several_forwards_in_flight(pattern, enable: str, adapters: int) -> None:
    """Transformers' own checkpointing of a converted model, and of its copy, guesses nothing."""
    model, ids = converted(**dict(list(CONFIGS.items())[:adapters])).train(), token_ids(4, 7)
    if not hasattr(model, f"{enable}_checkpointing_enable"):
        pytest.skip(f"this version of Transformers has no {enable}_checkpointing_enable")
    expected = pattern(model, ids)
    getattr(model, f"{enable}_checkpointing_enable")()
    clone = copy.deepcopy(model)
    assert_same(pattern(model, ids), expected)
    assert_same(pattern(clone, ids), expected)


@pytest.mark.parametrize("context_fn", [False, True], ids=["reentrant", "context_fn given"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_checkpointing_never_guesses(pattern, context_fn: bool) -> None:
    """Where the forward pass is not known, an error names the remedy, or the result is right."""
    model, ids = converted().train(), token_ids(4, 7)
    expected = pattern(model, ids)
    options: dict = {"use_reentrant": True}
    if context_fn:
        options = {"use_reentrant": False, "context_fn": noop_context_fn}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if pattern is backward_after_two_dropped_forwards:
        assert_same(pattern(model, ids), expected)
        return
    with pytest.raises(ValueError, match=r"2 forward passes are in flight.*checkpoint_contexts\(model\)"):
        pattern(model, ids)


def test_checkpointing_of_forwards_that_are_alike() -> None:
    """Without dropout the passes of one adapter are alike, and nothing has to be known."""
    model = converted(a=LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")).train()
    ids = token_ids(4, 7)
    expected = one_backward_of_two_forwards(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert_same(one_backward_of_two_forwards(model, ids), expected)


def test_checkpointing_in_a_loop_that_keeps_its_last_loss() -> None:
    """A backward that has freed its graph leaves nothing in flight, though the loss is still held."""
    model, ids = converted().train(), token_ids(4, 7)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    for _ in range(3):
        loss = model(input_ids=ids, adapter_names=NAMES).logits.square().sum()
        loss.backward()
    assert gradients(model)


def test_checkpointing_with_a_loss_of_ones_own() -> None:
    """Any part of the output keeps a forward pass in flight, not only its first tensor."""
    model, ids = converted().train(), token_ids(4, 7)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits = model(input_ids=ids, labels=ids, adapter_names=NAMES).logits
    logits.square().mean().backward()
    assert gradients(model)


def test_checkpointing_after_an_abandoned_forward() -> None:
    """A forward pass whose graph is gone is no longer in flight."""
    model, ids = converted().train(), token_ids(4, 7)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = model(input_ids=ids, adapter_names=NAMES).logits.sum()
    del loss
    model(input_ids=ids, adapter_names=NAMES[::-1]).logits.sum().backward()
    assert gradients(model)


def replace(model: nn.Module) -> None:
    mx.remove_adapter(model, "a")
    mx.add_adapter(model, "a", CONFIGS["a"])


CHANGES = {
    "evaluation": (lambda model: model.eval(), "put into evaluation mode"),
    "one layer": (lambda model: model.model.layers[0].mlp.up_proj.eval(), "put into evaluation mode"),
    "removed": (lambda model: mx.remove_adapter(model, "a"), "adapter 'a' has been removed or replaced"),
    "replaced": (replace, "adapter 'a' has been removed or replaced"),
    "updated": (lambda model: model.mlora_router.updates.record("a"), "adapter 'a' was changed in place"),
}


@pytest.mark.parametrize(
    "kwargs",
    [{"use_reentrant": True}, {}, {"context_fn": noop_context_fn}],
    ids=["reentrant", "non-reentrant", "context_fn given"],
)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_recomputation_would_read_otherwise(change: str, kwargs: dict[str, object]) -> None:
    """PEFT raises, too: the recomputation saves other tensors. Here masks take no part in what is saved."""
    model, (act, message) = converted().train(), CHANGES[change]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    model.enable_input_require_grads()
    loss = model(input_ids=token_ids(4, 7), adapter_names=NAMES).logits.square().sum()
    act(model)
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_may_change_before_a_recomputation(reentrant: bool) -> None:
    """An evaluation in between, other adapters that come and go, and another default: bit-equal gradients."""
    model, ids = converted().train(), token_ids(4, 7)
    layout = mx.SegmentLayout.from_lengths([14, 14])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = []
    with mx.route(model, layout, ["a", "b"], steps=[1, 1]):
        for disturbed in (False, True, False):
            loss = model(input_ids=ids).logits.square().sum()
            if disturbed:
                mx.add_adapter(model, "c", CONFIGS["b"])
                mx.remove_adapter(model, "c")
                model.set_adapter("b")
                with torch.no_grad():
                    model.eval()(input_ids=ids)
                model.train()
            loss.backward()
            found.append(gradients(model))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_adapters_switched_off_before_a_part_is_recomputed() -> None:
    model, x = converted(a=LoraConfig(target_modules=["q_proj"])), torch.randn(3, 32, requires_grad=True)
    layer = model.model.layers[0].self_attn.q_proj
    for context_fn in (noop_context_fn, mx.checkpoint_contexts(model)):
        loss = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn).sum()
        with mx.disable_adapter(model), pytest.raises(RuntimeError, match="other adapters have been set"):
            loss.backward()
