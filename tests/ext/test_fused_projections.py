"""q, k and v, gate and up: one call that reads x once, with the same results as layer by layer."""

import copy
from collections import Counter

import pytest
import torch
from backends import BACKENDS, fixture_of
from models import NAMES, assert_same, converted, gradients, llama, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import nn
from torch.utils.checkpoint import checkpoint

import mlora_ext as mx
from mlora_ext.backends.selection import gpu_operator
from mlora_ext.layers import fused_projections as module
from mlora_ext.layers.linear import MultiLoRALinear

GPU_BACKENDS = [backend for backend in BACKENDS if "cuda" in str(backend)]
"""Only `cuda` serves several layers in one call."""
CONFIGS = {
    "a": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3, init_lora_weights=False),
    "b": LoraConfig(r=7, target_modules="all-linear", init_lora_weights=False),
}


backend = fixture_of(GPU_BACKENDS)


@pytest.fixture
def calls(backend: str, monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How often the operator was called, forward and backward."""
    counts: Counter = Counter()
    operator = gpu_operator(backend)
    for name in ("forward", "backward"):
        call = getattr(operator, name)

        def counted(*arguments, name=name, call=call):
            counts[name] += 1
            return call(*arguments)

        monkeypatch.setattr(operator, name, counted)
    return counts


def alone(model: nn.Module) -> nn.Module:
    """A copy of the model whose layers know no fused_projections."""
    clone = copy.deepcopy(model)
    for layer in clone.modules():
        if isinstance(layer, MultiLoRALinear):
            layer.fused_projections = None
    return clone


def step(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.mlora_router.step = 3
    out = model(input_ids=ids, adapter_names=NAMES, labels=ids)
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach()} | gradients(model)


def test_same_as_layer_by_layer(calls: Counter) -> None:
    model = converted(1, **CONFIGS).train()
    ids = token_ids(4, 6)
    together = step(model, ids)
    assert calls == {"forward": 4, "backward": 4}, "q k v, o, gate up, down"
    calls.clear()
    separate = step(alone(model), ids)
    assert calls == {"forward": 7, "backward": 7}
    assert_same(together, separate)


def test_each_layer_draws_masks_of_its_own() -> None:
    """With equal weights in k and v, dropout alone tells them apart."""
    model = converted(1, a=CONFIGS["a"]).train()
    attention = model.model.layers[0].self_attn
    attention.v_proj.load_state_dict(attention.k_proj.state_dict())
    x = torch.randn(9, 32)
    with mx.route(model, mx.SegmentLayout.from_lengths([9]), names=["a"], steps=[1]):
        attention.q_proj(x)
        k, v = attention.k_proj(x), attention.v_proj(x)
    assert not torch.equal(k, v)
    with mx.route(model.eval(), mx.SegmentLayout.from_lengths([9]), names=["a"], steps=[1]):
        attention.q_proj(x)
        assert torch.equal(attention.k_proj(x), attention.v_proj(x))


def test_checkpointing(calls: Counter) -> None:
    model = converted(1, **CONFIGS).train()
    ids = token_ids(4, 6)
    expected = step(model, ids)
    model.enable_input_require_grads()
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        calls.clear()
        assert_same(step(model, ids), expected)
        assert calls["backward"] == 4


def test_layers_with_other_adapters_are_no_siblings(calls: Counter) -> None:
    """b sits on q only: q computes alone, k and v together; until b leaves."""
    model = converted(1, a=CONFIGS["a"], b=LoraConfig(r=3, target_modules=["q_proj"])).eval()
    ids = token_ids(4, 6)
    with torch.no_grad():
        model(input_ids=ids, adapter_names=NAMES)
        assert calls["forward"] == 5
        calls.clear()
        mx.remove_adapter(model, "b")
        model(input_ids=ids, adapter_names=["a"] * 4)
    assert calls["forward"] == 4


def attend(attention: nn.Module, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The products of a cross-attention, so that all of them are in the result."""
    return attention.q_proj(x) + torch.cat([attention.k_proj(memory), attention.v_proj(memory)], 1)


def test_layers_that_see_another_x(calls: Counter) -> None:
    """As in cross-attention: right results, no more work in vain after a few routes, and nothing is kept."""
    model = converted(1, a=CONFIGS["a"]).train()
    attention, layout = model.model.layers[0].self_attn, mx.SegmentLayout.from_lengths([5])
    other = alone(model)
    for turn in range(module._PATIENCE + 1):
        calls.clear()
        x, memory = torch.randn(5, 32), torch.randn(5, 32)
        found = []
        for one in (model, other):
            with mx.route(one, layout, names=["a"], steps=[turn]):
                y = attend(one.model.layers[0].self_attn, x, memory)
                y.square().sum().backward()
            found.append({"y": y.detach()} | gradients(one))
        assert_same(*found)
    assert calls["forward"] == 3 + 3
    assert not any(waiting.outputs for waiting in attention.q_proj.fused_projections._waiting.values())


@pytest.mark.parametrize("turn", range(module._PATIENCE + 1))
def test_checkpointed_layers_that_see_another_x(turn: int) -> None:
    """What is recomputed is what was computed, also where layers give up on each other in between."""
    model = converted(1, a=CONFIGS["a"]).train()
    attention, layout = model.model.layers[0].self_attn, mx.SegmentLayout.from_lengths([5])
    attention.q_proj.fused_projections.disappointed = turn
    x, memory = torch.randn(5, 32, requires_grad=True), torch.randn(5, 32)
    found = []
    for how in ("plain", "checkpointed"):
        x.grad = None
        with mx.route(model, layout, names=["a"], steps=[turn]):
            if how == "plain":
                y = attend(attention, x, memory)
            else:
                context = mx.checkpoint_contexts(model)
                y = checkpoint(attend, attention, x, memory, use_reentrant=False, context_fn=context)
        y.square().sum().backward()
        found.append({"x": x.grad} | gradients(model))
    assert_same(*found)


def test_a_failed_pass_leaves_nothing_behind() -> None:
    model = converted(1, a=CONFIGS["a"]).train()
    attention, x = model.model.layers[0].self_attn, torch.randn(5, 32)
    fused_projections = attention.q_proj.fused_projections

    def interrupted() -> None:
        with mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"]):
            attention.q_proj(x)
            assert fused_projections._waiting[False].outputs
            raise MemoryError

    with pytest.raises(MemoryError):
        interrupted()
    assert not fused_projections._waiting[False].outputs


def test_x_that_was_written_to_is_another_x() -> None:
    model = converted(1, a=CONFIGS["a"]).eval()
    attention, x = model.model.layers[0].self_attn, torch.randn(5, 32)
    with torch.no_grad(), mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"]):
        attention.q_proj(x)
        x.add_(1)
        k = attention.k_proj(x)
        expected = alone(model)
    with torch.no_grad(), mx.route(expected, mx.SegmentLayout.from_lengths([5]), names=["a"]):
        assert_same_up_to_rounding(k, expected.model.layers[0].self_attn.k_proj(x), "k")


def test_nothing_waits_in_a_copy() -> None:
    model = converted(1, a=CONFIGS["a"]).eval()
    attention, x = model.model.layers[0].self_attn, torch.randn(5, 32)
    with torch.no_grad(), mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"]):
        attention.q_proj(x)
        clone = copy.deepcopy(attention.q_proj.fused_projections)
    assert not clone._waiting[False].outputs
    assert [layer.name for layer in clone.layers] == [
        layer.name for layer in attention.q_proj.fused_projections.layers
    ]
    assert clone.layers[0] is not attention.q_proj


def test_an_optimizer_step_between_forward_and_backward_is_noticed() -> None:
    model = converted(1, a=CONFIGS["a"]).train()
    ids = token_ids(2, 5)
    loss = model(input_ids=ids, adapter_names=["a", "a"], labels=ids).loss
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.lora_A.parameter_of("a").add_(1)
    with pytest.raises(RuntimeError, match="was changed in place between forward and backward"):
        loss.backward()


def test_one_unused_output_and_frozen_adapters() -> None:
    """A sibling whose result nobody uses gets no gradients, nor does a frozen adapter."""
    model = converted(1, a=CONFIGS["a"]).train()
    attention, x = model.model.layers[0].self_attn, torch.randn(5, 32, requires_grad=True)
    frozen = attention.q_proj.lora_A.parameter_of("a").requires_grad_(False)
    with mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"], steps=[0]):
        (attention.q_proj(x).sum() + attention.k_proj(x).sum()).backward()
    assert frozen.grad is None
    assert attention.k_proj.lora_A.parameter_of("a").grad.abs().sum() > 0
    assert attention.v_proj.lora_B.parameter_of("a").grad is None
    assert x.grad is not None


def test_reentrant_checkpoint_of_a_part() -> None:
    model = converted(1, a=CONFIGS["a"]).train()
    attention, x = model.model.layers[0].self_attn, torch.randn(5, 32, requires_grad=True)

    def part(x: torch.Tensor) -> torch.Tensor:
        return attention.q_proj(x) * 2 + torch.cat([attention.k_proj(x), attention.v_proj(x)], 1)

    found = []
    for recompute in (False, True):
        x.grad = None
        with mx.route(model, mx.SegmentLayout.from_lengths([5]), names=["a"], steps=[2]):
            y = checkpoint(part, x, use_reentrant=False) if recompute else part(x)
            y.sum().backward()
        found.append({"x": x.grad} | gradients(model))
    assert_same(*found)


def test_llama_has_siblings() -> None:
    model = mx.convert_model(llama(1), {"a": CONFIGS["a"]})
    layer = model.model.layers[0]
    fused = layer.self_attn.k_proj.fused_projections.layers
    assert [one.name.rpartition(".")[2] for one in fused] == ["q_proj", "k_proj", "v_proj"]
    assert layer.self_attn.o_proj.fused_projections is None
    assert layer.mlp.up_proj.fused_projections is layer.mlp.gate_proj.fused_projections
