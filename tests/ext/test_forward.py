"""`adapter_names` and `mlora_ext.route`, also in `generate`: samples meet their own adapters."""

import copy
from pathlib import Path

import pytest
import torch
from models import (
    CONFIGS,
    NAMES,
    assert_same,
    converted,
    copy_weights,
    gpt2,
    gradients,
    llama,
    peft_model,
    token_ids,
)
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import nn

import mlora_ext as mx


@pytest.mark.parametrize("build", [llama, gpt2])
def test_padded_batches_and_embeddings(build) -> None:
    model = mx.convert_model(build(), {"a": LoraConfig(r=4, init_lora_weights=False)}).eval()
    mx.add_adapter(model, "b", LoraConfig(r=3, init_lora_weights=False))
    ids = token_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    together = model(input_ids=ids, attention_mask=mask, adapter_names=["a", "b"]).logits
    alone = model(input_ids=ids[1:, :4], adapter_names=["b"]).logits
    assert_same_up_to_rounding(together[1:, :4], alone, "logits")
    embeddings = model.get_input_embeddings()(ids)
    again = model(inputs_embeds=embeddings, attention_mask=mask, adapter_names=["a", "b"]).logits
    torch.testing.assert_close(again, together)


def test_training_equals_training_alone() -> None:
    model, ids = converted().train(), token_ids(4, 7)
    model(input_ids=ids, adapter_names=NAMES).logits.square().sum().backward()
    together = gradients(model)
    model.mlora_router.step = 0
    alone = {}
    for name, rows in {"a": [0, 3], "b": [1]}.items():
        model(input_ids=ids[rows], adapter_names=[name] * len(rows)).logits.square().sum().backward()
        alone |= gradients(model)
        model.mlora_router.step = 0
    assert_same(together, alone)


def test_batch_mates_between_samples_change_no_bit() -> None:
    """Neighbouring samples of one adapter are summed as separated ones are."""
    config = LoraConfig(r=8, target_modules=["0"], lora_dropout=0.3, init_lora_weights=False)
    model = mx.convert_model(nn.Sequential(nn.Linear(32, 24)), {"a": config, "b": config}).train()
    x, dy = torch.randn(3, 37, 32), torch.randn(3, 37, 24)
    weights = list(mx.adapter_parameters(model, "a").values())
    found = []
    for rows, names in (([0, 2], ["a", "a"]), ([0, 1, 2], ["a", "b", "a"])):
        model.mlora_router.step = 0
        found.append(torch.autograd.grad(model(x[rows], adapter_names=names), weights, dy[rows]))
    for alone, between in zip(*found, strict=True):
        assert torch.equal(alone, between)


def test_padding_after_a_sample_moves_no_mask() -> None:
    """Batch-mates that force padding on the right leave the masks of an adapter's samples alone."""
    model, ids = converted().train(), token_ids(3, 9)
    mask = torch.ones_like(ids)
    mask[:2, 6:] = 0
    padded = model(input_ids=ids, attention_mask=mask, adapter_names=["a", "a", "b"]).logits[:2, :6]
    model.mlora_router.step = 0
    alone = model(input_ids=ids[:2, :6], adapter_names=["a", "a"]).logits
    assert_same_up_to_rounding(padded, alone, "logits")


def test_nan_adapter_changes_no_bit_of_another() -> None:
    model, ids = converted().train(), token_ids(4, 7)

    def run() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.mlora_router.step = 0
        logits = model(input_ids=ids, adapter_names=NAMES).logits
        logits.square().sum().backward()
        return logits.detach(), gradients(model)

    clean = run()
    with torch.no_grad():
        for parameter in mx.adapter_parameters(model, "a").values():
            parameter.fill_(torch.nan)
    dirty = run()
    assert dirty[0][[0, 3]].isnan().all()
    assert torch.equal(clean[0][1:3], dirty[0][1:3])
    for key in mx.adapter_parameters(model, "b"):
        assert torch.equal(clean[1][key], dirty[1][key]), key


def test_absent_adapters_get_no_gradient() -> None:
    model = converted().train()
    model(input_ids=token_ids(1, 5), adapter_names=["a"]).logits.sum().backward()
    assert all(p.grad is not None for p in mx.adapter_parameters(model, "a").values())
    assert all(p.grad is None for p in mx.adapter_parameters(model, "b").values())


def test_only_adapter_needs_no_names() -> None:
    model = converted(a=CONFIGS["a"]).eval()
    ids = token_ids(2, 5)
    expected = model(input_ids=ids, adapter_names=["a", "a"]).logits
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert torch.equal(model.model(input_ids=ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, ids: m(input_ids=ids), r"2 adapters \(a, b\) and no active route: pass adapter_names"),
        (lambda m, ids: m(ids, adapter_names=["a"]), r"one name per sample \(2\), .* got \['a'\]"),
        (lambda m, ids: m(ids, adapter_names="ab"), r"one name per sample \(2\), .* got 'ab'"),
        (lambda m, ids: m(ids, adapter_names=["a", "z"]), "no adapter 'z' in this model; its adapters: a, b"),
        (lambda m, ids: m.generate(ids, adapter_names=["a"]), r"one name per sample \(2\)"),
    ],
)
def test_refusals(call, message: str) -> None:
    model, ids = converted().eval(), token_ids(2, 5)
    with pytest.raises(ValueError, match=message):
        call(model, ids)
    model(input_ids=ids, adapter_names=["a", "b"])


def test_any_module_can_be_converted() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    configs = {n: LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False) for n in "ab"}
    mx.convert_model(model, configs)
    x = torch.randn(3, 6)
    together = model(x, adapter_names=["b", "a", "b"])
    torch.testing.assert_close(model(x[1:2], adapter_names=["a"]), together[1:2])
    assert not torch.allclose(model(x[1:2], adapter_names=["b"]), together[1:2])


@pytest.mark.parametrize("shape", [(0, 6), (0, 3, 6)], ids=str)
def test_batch_of_no_samples(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    mx.convert_model(model, {n: LoraConfig(r=2, target_modules=["0", "1"]) for n in "ab"})
    y = model(torch.randn(shape), adapter_names=[])
    assert y.shape == (*shape[:-1], 4)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
def test_generate(how: dict) -> None:
    """Each prompt continues as PEFT continues it alone; with the KV cache and padding on the left."""
    base = llama().eval()
    peft = peft_model(base, CONFIGS).eval()
    model = mx.convert_model(copy.deepcopy(base), CONFIGS).eval()
    copy_weights(peft, model, CONFIGS)
    ids = token_ids(3, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **how}
    names = ["b", "a", "__base__"]
    ours = model.generate(ids, attention_mask=mask, adapter_names=names, **options)
    clone = copy.deepcopy(model)
    assert torch.equal(
        clone.generate(input_ids=ids, attention_mask=mask, adapter_names=names, **options), ours
    )
    each = len(ours) // 3
    for index, name in enumerate(names):
        start = 2 if index == 1 else 0
        prompt = ids[index : index + 1, start:]
        if name == "__base__":
            theirs = base.generate(prompt, **options)
        else:
            peft.set_adapter(name)
            theirs = peft.generate(prompt, **options)
        assert torch.equal(ours[index * each : (index + 1) * each, start:], theirs)


def test_generate_samples_several_sequences() -> None:
    model = converted().eval()
    out = model.generate(
        token_ids(2, 4), adapter_names=["a", "b"], do_sample=True, num_return_sequences=3, max_new_tokens=4,
        min_new_tokens=4,
    )  # fmt: skip
    assert out.shape == (6, 8)


def test_pickled_model_is_whole(tmp_path: Path) -> None:
    model, ids = converted().eval(), token_ids(2, 5)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    options = {"adapter_names": ["b", "a"], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(again.generate(ids, **options), model.generate(ids, **options))


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
