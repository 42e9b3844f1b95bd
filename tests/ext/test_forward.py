"""`adapter_names` in training and generation, routes, and recomputation by activation checkpointing."""

import copy
from pathlib import Path

import pytest
import torch
from models import copy_weights, gpt2, llama, peft_model, token_ids
from peft import LoraConfig
from safetensors.torch import load_file
from tolerances import assert_same_up_to_rounding
from torch import nn
from torch.utils.checkpoint import noop_context_fn
from transformers import Trainer, TrainingArguments

import mlora_ext as mx

NAMES = ["a", "b", "__base__", "a"]
CONFIGS = {
    "a": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.4, init_lora_weights=False),
    "b": LoraConfig(r=7, target_modules=["q_proj", "down_proj"], lora_dropout=0.2, init_lora_weights=False),
}


def converted(**configs: LoraConfig) -> nn.Module:
    return mx.convert_model(llama(), configs or CONFIGS, seed=int(torch.randint(2**31, ())))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert one
    for key, value in one.items():
        assert_same_up_to_rounding(value, other[key], key)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_padded_batches_and_embeddings(build) -> None:
    model = mx.convert_model(build(), {"a": LoraConfig(r=4, init_lora_weights=False)}).eval()
    mx.add_adapter(model, "b", LoraConfig(r=3, init_lora_weights=False))
    ids = token_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    together = model(input_ids=ids, attention_mask=mask, adapter_names=["a", "b"]).logits
    alone = model(input_ids=ids[1:, :4], adapter_names=["b"]).logits
    torch.testing.assert_close(together[1:, :4], alone, rtol=1e-4, atol=1e-5)
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
    config = LoraConfig(r=8, target_modules=["q_proj"], lora_dropout=0.3, init_lora_weights=False)
    model = mx.convert_model(llama(), {"a": config, "b": config}).train()
    layer = next(iter(mx.adapter_parameters(model, "a"))).partition(".lora_A")[0]
    layer, x = model.get_submodule(layer), torch.randn(3, 37, 32)
    dy = torch.randn(3, 37, layer.out_features)
    weights = [layer.lora_A.parameter_of("a"), layer.lora_B.parameter_of("a")]
    found = []
    for rows, names in (([0, 2], ["a", "a"]), ([0, 1, 2], ["a", "b", "a"])):
        router = model.mlora_router
        with router.entered(router.sampled(names)):
            found.append(torch.autograd.grad(layer(x[rows]), weights, dy[rows]))
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
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)


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


def test_each_training_forward_is_a_step() -> None:
    model, ids = converted().train(), token_ids(1, 5)
    one, two = (model(input_ids=ids, adapter_names=["a"]).logits for _ in range(2))
    assert not torch.allclose(one, two, atol=1e-3)
    with torch.no_grad():
        model(input_ids=ids, adapter_names=["a"])
    model.eval()(input_ids=ids, adapter_names=["a"])
    assert model.mlora_router.step == 2


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
        (lambda m, ids: m(ids, adapter_names=["a"]), r"one name per sample \(2\), got \['a'\]"),
        (lambda m, ids: m(ids, adapter_names="ab"), r"one name per sample \(2\), got 'ab'"),
        (lambda m, ids: m(ids, adapter_names=["a", "z"]), "no adapter 'z' in this model; its adapters: a, b"),
        (lambda m, ids: m.generate(ids, adapter_names=["a"]), r"one name per sample \(2\)"),
    ],
)
def test_refusals(call, message: str) -> None:
    model, ids = converted().eval(), token_ids(2, 5)
    with pytest.raises(ValueError, match=message):
        call(model, ids)
    model(input_ids=ids, adapter_names=["a", "b"])


def test_route_refusals() -> None:
    model, ids = converted(), token_ids(1, 5)
    layout = mx.SegmentLayout.from_lengths([2, 2])
    with mx.route(model, layout), pytest.raises(ValueError, match=r"expected rows of the active route \(4\)"):
        model(input_ids=ids)
    with mx.route(model, layout), pytest.raises(ValueError, match="a route is active already"):
        model(input_ids=ids, adapter_names=["a"])
    for names, steps, message in [
        (["a"], None, r"layout: expected adapters below 1 .* got 1"),
        (["a", "a"], None, "names: expected each adapter once"),
        (["a", "z"], None, "names: no adapter 'z'"),
        (["a", "b"], [1], r"steps: expected one per name \(2\), got 1"),
        (["a", "b"], 3, "steps: expected a list of one per name, got 3"),
        ("ab", None, r"names: expected a list of adapters, got 'ab'"),
    ]:
        with pytest.raises(ValueError, match=message), mx.route(model, layout, names, steps=steps):
            pass


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


@pytest.mark.parametrize("how", ["forward", "generate", "route"])
def test_inference_mode_before_training(how: str) -> None:
    """What is cached under inference mode serves a training step afterwards."""
    model, ids = converted().train(), token_ids(2, 5)
    layout = mx.SegmentLayout.from_lengths([5, 5])

    def run(**options: object) -> torch.Tensor:
        if how != "route":
            return model(ids, adapter_names=["a", "b"], **options).logits
        with mx.route(model, layout, names=["a", "b"]):
            return model(ids, **options).logits

    with torch.inference_mode():
        if how == "generate":
            model.generate(ids, adapter_names=["a", "b"], max_new_tokens=2)
        else:
            run()
    model.mlora_router.step = 0
    run().square().sum().backward()
    found = gradients(model)
    clone = copy.deepcopy(model)
    clone.mlora_router.step = 0
    clone(ids, adapter_names=["a", "b"]).logits.square().sum().backward()
    assert_same(found, gradients(clone))


def test_forward_without_gradients_is_not_in_flight() -> None:
    """A route entered in training mode that saw only `no_grad` leaves nothing to be recomputed."""
    model, ids = converted().train(), token_ids(1, 5)
    layout = mx.SegmentLayout.from_lengths([5])
    with mx.route(model, layout, names=["a"]), torch.no_grad():
        model(input_ids=ids)
    assert not model.mlora_router._flights
    with mx.route(model, layout, names=["a"]):
        model.model(input_ids=ids)
    assert len(model.mlora_router._flights) == 1


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


def test_two_copies_do_not_meet() -> None:
    model = converted().eval()
    clone = copy.deepcopy(model)
    ids = token_ids(1, 5)
    with mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"]):
        with pytest.raises(ValueError, match="no active route"):
            clone(input_ids=ids)
        one = model(input_ids=ids).logits
    torch.testing.assert_close(clone(input_ids=ids, adapter_names=["a"]).logits, one)


def test_pickled_model_is_whole(tmp_path: Path) -> None:
    model, ids = converted().eval(), token_ids(2, 5)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    options = {"adapter_names": ["b", "a"], "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(again.generate(ids, **options), model.generate(ids, **options))


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


def test_autocast_trains() -> None:
    model = converted().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=token_ids(2, 5), adapter_names=["a", "b"]).logits.float().square().mean()
    loss.backward()
    found = gradients(model)
    assert found
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert all(g.isfinite().all() and g.any() for g in found.values())


def test_transformers_trainer(tmp_path: Path) -> None:
    """A converted model with one adapter trains in Trainer as PEFT's does, and is saved by it."""
    base, config = llama(), LoraConfig(r=4, target_modules="all-linear")
    peft = peft_model(base, {"x": config})
    model = mx.convert_model(copy.deepcopy(base), {"x": config})
    copy_weights(peft, model, {"x": config})
    data = [{"input_ids": ids, "labels": ids} for ids in token_ids(8, 6)]
    losses = []
    for trained in (peft, model):
        arguments = TrainingArguments(
            str(tmp_path / type(trained).__name__), max_steps=4, per_device_train_batch_size=2, seed=5,
            learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(trained, arguments, train_dataset=data)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    mx.add_adapter(model, "y", LoraConfig(r=3))
    model.save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    for key, parameter in mx.adapter_parameters(model, "x").items():
        assert torch.equal(stored[key], parameter)
