"""Gradients that adapters keep: backward adds to them itself, and the numbers are autograd's."""

import copy
import gc
import weakref

import pytest
import torch
from backends import BACKENDS, QUICK, fixture_of
from cases import Case, assert_right, make
from models import assert_same, converted, gradients, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import mlora_ext as mx
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.frozen.weight import FrozenWeight
from mlora_ext.layers.bank import AdapterBank
from mlora_ext.layers.linear import MultiLoRALinear
from mlora_ext.ops.autograd import lora_linear_held
from mlora_ext.ops.held import HeldAdapters, UpdateCounts, hold

backend = fixture_of(BACKENDS)


def with_gradients(case: Case) -> Case:
    for leaf in leaves(case):
        leaf.grad = torch.zeros_like(leaf)
    return case


def leaves(case: Case) -> list[torch.Tensor]:
    return [*case.lora_a, *case.lora_b]


def held_of(case: Case, written: set[str] | None = None) -> HeldAdapters | None:
    names = tuple(f"a{i}" for i in range(len(case.lora_a)))
    return hold(names, case.lora_a, case.lora_b, [set() if written is None else written])


def forward(
    case: Case,
    held: HeldAdapters | None,
    updates: UpdateCounts | None = None,
    frozen: type[FrozenWeight] = PlainWeight,
) -> torch.Tensor:
    assert held is not None
    x, weight, bias, _, _, *plan = case.operator_arguments()
    found = lora_linear_held(x, [frozen.of(weight)], [bias], held, tuple(plan), updates or UpdateCounts())
    assert found is not None
    return found[0]


class Unfused(PlainWeight):
    """A weight that makes its products itself, as a quantised one does."""

    def fused(self, x: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("frozen", [PlainWeight, Unfused])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[6, 5, 9], [1100, 0, 3]], ids=["one run", "several runs"])
def test_right_and_added(dtype: torch.dtype, lengths: list[int], frozen: type[FrozenWeight]) -> None:
    case = make(
        [4, 7, 20], lengths, [0, 1, 2], d_in=24, d_out=16, dtype=dtype, adapter_dtype=torch.float32, p=0.2
    )
    held = held_of(with_gradients(case))
    y = forward(case, held, frozen=frozen)
    y.backward(case.dy)
    assert case.x.grad is not None
    once = [leaf.grad.clone() for leaf in leaves(case)]
    assert_right(case, [y.detach(), case.x.grad, *once])
    places = [leaf.grad.data_ptr() for leaf in leaves(case)]
    forward(case, held, frozen=frozen).backward(case.dy)
    for leaf, grad, place in zip(leaves(case), once, places, strict=True):
        assert leaf.grad.data_ptr() == place
        assert_same_up_to_rounding(leaf.grad, 2 * grad, "gradient")


def test_x_that_needs_no_gradient() -> None:
    case = with_gradients(make([4, 7], [6, 5], [0, 1]))
    case.x.requires_grad_(False)
    forward(case, held_of(case)).backward(case.dy)
    assert all(leaf.grad.any() for leaf in leaves(case))
    assert case.x.grad is None


def test_used_twice_in_one_graph() -> None:
    case = with_gradients(make([4, 7], [6, 5], [0, 1]))
    held = held_of(case)
    forward(case, held).backward(case.dy)
    once = [leaf.grad.clone() for leaf in leaves(case)]
    (forward(case, held) + forward(case, held)).backward(case.dy)
    for leaf, grad in zip(leaves(case), once, strict=True):
        assert_same_up_to_rounding(leaf.grad, 3 * grad, "gradient")


def test_gradients_anywhere_in_memory() -> None:
    """`.grad` apart from each other, in either order of dimensions, as a foreign loop may have set it."""
    case = make([4, 7], [6, 5], [0, 1])
    expected = case.run()[2:]
    for index, leaf in enumerate(leaves(case)):
        leaf.grad = torch.zeros(leaf.shape) if index % 2 else torch.zeros(leaf.shape[::-1]).t()
    places = [leaf.grad.data_ptr() for leaf in leaves(case)]
    forward(case, held_of(case)).backward(case.dy)
    for leaf, grad, place in zip(leaves(case), expected, places, strict=True):
        assert leaf.grad.data_ptr() == place
        assert_same_up_to_rounding(leaf.grad, grad, "gradient")


@pytest.mark.parametrize("why", ["missing", "hook", "frozen", "post-accumulate hook", "expanded", "bf16"])
def test_left_to_autograd(why: str) -> None:
    """Where somebody listens, or adding in place would be another number."""
    made = with_gradients(make([4, 7], [6, 5], [0, 1]))
    parameter = made.lora_a[1]
    match why:
        case "missing":
            parameter.grad = None
        case "hook":
            parameter.register_hook(lambda grad: grad)
        case "post-accumulate hook":
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        case "expanded":
            parameter.grad = torch.zeros(1, 1).expand(parameter.shape)
        case "frozen":
            parameter.requires_grad_(False)
        case _:
            made = with_gradients(make([4, 7], [6, 5], [0, 1], dtype=torch.bfloat16))
    assert held_of(made) is None


def test_an_update_between_forward_and_backward_is_refused() -> None:
    case, updates, written = with_gradients(make([4, 7], [6, 5], [0, 1])), UpdateCounts(), set()
    y = forward(case, held_of(case, written), updates)
    updates.record("mate")
    updates.record("a1")
    with pytest.raises(RuntimeError, match=r"adapter 'a1' was changed in place between forward and backward"):
        y.backward(case.dy)
    assert not written
    assert not any(leaf.grad.any() for leaf in leaves(case))
    y = forward(case, held_of(case, written), updates)
    updates.record("mate")
    y.backward(case.dy)
    assert written == {"a0", "a1"}


def test_an_adapter_without_rows_keeps_its_gradient() -> None:
    case = with_gradients(make([4, 7], [6, 5], [0, 1]))
    held = held_of(case)
    forward(case, held).backward(case.dy)
    kept = case.lora_a[1].grad.clone()
    case.layout = mx.SegmentLayout.from_lengths([11], [0])
    forward(case, held).backward(case.dy)
    assert torch.equal(case.lora_a[1].grad, kept)


CONFIGS = {name: LoraConfig(r=r, target_modules="all-linear") for name, r in (("a", 3), ("b", 5))}


def held_model() -> nn.Module:
    """With adapters on two layers that share their input, and on one alone."""
    some = ["q_proj", "v_proj", "down_proj"]
    configs = {name: LoraConfig(r=config.r, target_modules=some) for name, config in CONFIGS.items()}
    model = converted(1, **configs).train()
    model.mlora_router.accumulates = True
    return zeroed(model)


def zeroed(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    model.mlora_router.moved()
    return model


def train(model: nn.Module, ids: torch.Tensor) -> None:
    model(input_ids=ids, adapter_names=["a", "b"], labels=ids).loss.backward()


@pytest.mark.parametrize("backend", QUICK, indirect=True)
def test_whole_model() -> None:
    """Two micro-batches, and whether the layers took the way that is tested here."""
    model, batches = converted(1, **CONFIGS).train(), [token_ids(2, 5) for _ in range(2)]
    for ids in batches:
        train(model, ids)
    expected = gradients(model)
    model.mlora_router.accumulates = True
    zeroed(model)
    for ids in batches:
        train(model, ids)
    layers = [module for module in model.modules() if isinstance(module, MultiLoRALinear)]
    assert layers
    assert all(layer.written == {"a", "b"} for layer in layers)
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("how", ["added", "removed", "moved", "loaded", "copied"])
def test_tables_follow_their_parameters(how: str, backend: str) -> None:
    """An adapter came or went, or Parameters and gradients got other memory, between two passes."""
    ids, model = token_ids(2, 5), held_model()
    train(model, ids)
    expected = gradients(model)
    if how == "added":
        mx.add_adapter(model, "c", LoraConfig(r=40, target_modules="all-linear"))
        assert model.mlora_router.adapters
    elif how == "removed":
        mx.add_adapter(model, "c", LoraConfig(r=2, target_modules="all-linear"))
        mx.remove_adapter(model, "c")
    elif how == "moved":
        model.double().float()
    elif how == "loaded":
        state = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    else:
        model = copy.deepcopy(model)
    zeroed(model)
    for parameter in [p for name, p in model.named_parameters() if ".c." in name]:
        parameter.grad = None
    train(model, ids)
    found = {key: grad for key, grad in gradients(model).items() if ".c." not in key}
    assert_same(found, expected)


def test_a_removed_adapter_leaves_no_memory_behind() -> None:
    """Also in layers that keep no adapter, whose tables nobody asks for again."""
    some = LoraConfig(r=3, target_modules=["q_proj"])
    model = converted(1, a=LoraConfig(r=3, target_modules="all-linear"), b=some).train()
    model.mlora_router.accumulates = True
    train(zeroed(model), token_ids(2, 5))
    gone = [
        weakref.ref(p.grad.untyped_storage())
        for name, p in model.named_parameters()
        if ".a." in name and p.grad is not None
    ]
    pages = [weakref.ref(page) for bank in banks(model, "up_proj") for page in bank._pages]
    mx.remove_adapter(model, "a")
    gc.collect()
    assert gone
    assert pages
    assert not [ref for ref in (*gone, *pages) if ref() is not None]


def banks(model: nn.Module, layer: str) -> list[AdapterBank]:
    found = [module for name, module in model.named_modules() if name.endswith(layer)]
    return [bank for one in found for bank in (one.lora_A, one.lora_B)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    ids, model = token_ids(2, 5), held_model()
    train(model, ids)
    expected = gradients(model)
    zeroed(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    train(model, ids)
    assert_same(gradients(model), expected)


def test_differentiable_once_and_not_by_functional_transforms() -> None:
    case = make([4, 7], [6, 5], [0, 1], adapter_dtype=torch.float32)
    held = held_of(with_gradients(case))
    case.dy.requires_grad_()
    forward(case, held).backward(case.dy, create_graph=True)
    assert case.x.grad is not None
    with pytest.raises(RuntimeError, match="second derivatives"):
        case.x.grad.sum().backward()
    x, weight, bias, _, _, *plan = case.operator_arguments()
    served: list[bool] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        found = lora_linear_held(x, [PlainWeight.of(weight)], [bias], held, tuple(plan), UpdateCounts())
        served.append(found is not None)
        return x.sum()

    torch.func.grad(loss)(x.detach())
    assert served == [False], "autograd's way, whose message says what is missing"


def own_loop(model: nn.Module, batches: list[torch.Tensor], hold: bool) -> dict[str, torch.Tensor]:
    """The weights after steps of two micro-batches each, with an optimizer for each adapter."""
    parameters = {name: list(mx.adapter_parameters(model, name).values()) for name in ("a", "b")}
    optimizers = {name: torch.optim.AdamW(own, lr=1e-2) for name, own in parameters.items()}
    held = mx.hold_gradients(model) if hold else None
    for ids in batches:
        for part in ids.split(2):
            train(model, part)
        for name, optimizer in optimizers.items():
            torch.nn.utils.clip_grad_norm_(parameters[name], 0.1)
            optimizer.step()
            if held is None:
                optimizer.zero_grad()
            else:
                held.zero([name])
    return {
        key: p.detach().clone()
        for name in parameters
        for key, p in mx.adapter_parameters(model, name).items()
    }


MIXTURES = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "bias": {"lora_bias": True},
}


@pytest.mark.parametrize("backend", QUICK, indirect=True)
@pytest.mark.parametrize("which", MIXTURES)
def test_a_loop_of_ones_own(which: str) -> None:
    """The same weights, also where some layers keep autograd's way."""
    config = {"target_modules": "all-linear", **MIXTURES[which]}
    model = converted(1, a=LoraConfig(r=3, **config), b=LoraConfig(r=5, target_modules="all-linear")).train()
    start, batches = copy.deepcopy(model.state_dict()), [token_ids(4, 5) for _ in range(3)]
    expected = own_loop(model, batches, hold=False)
    model.load_state_dict(start)
    for p in model.parameters():
        p.grad = None
    found = own_loop(model, batches, hold=True)
    assert any(layer.written for layer in model.modules() if isinstance(layer, MultiLoRALinear))
    assert not torch.equal(found[key := next(iter(found))], start[key])
    assert_same(found, expected)


REFUSED = {
    "zero_grad": "its .grad is not the one that hold_gradients keeps .* call zero()",
    "closure": "its .grad is not the one",
    "moved": "adapters were added or removed, or the model was moved or loaded, since",
    "loaded": "adapters were added or removed, or the model was moved",
    "added": "adapters were added or removed",
    "hook": "a hook came, or requires_grad changed, since hold_gradients; call it again",
    "frozen": "a hook came, or requires_grad changed",
    "unfrozen": "its .grad is not the one",
    "head": "its .grad is not the one",
}


@pytest.mark.parametrize("backend", QUICK, indirect=True)
@pytest.mark.parametrize("how", REFUSED)
def test_a_step_without_the_held_gradients_is_refused(how: str) -> None:
    other = {"modules_to_save": ["lm_head"]} if how == "head" else {}
    config = LoraConfig(r=3, target_modules="all-linear", **other)
    model, ids = converted(1, a=config, b=CONFIGS["b"]).train(), token_ids(2, 5)
    parameter = list(mx.adapter_parameters(model, "b").values())[-1]
    parameter.requires_grad_(how != "unfrozen")
    mx.hold_gradients(model)
    train(model, ids)
    before = parameter.detach().clone()
    match how:
        case "moved":
            model.double().float()
        case "loaded":
            state = {key: value.clone() for key, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        case "added":
            mx.add_adapter(model, "c", CONFIGS["a"])
        case "hook":
            parameter.register_hook(lambda grad: grad)
        case "frozen":
            parameter.requires_grad_(False)
        case "unfrozen":
            parameter.requires_grad_(True)
        case "head":
            head = next(p for key, p in mx.adapter_parameters(model, "a").items() if "lm_head" in key)
            head.grad.data = head.grad.clone()
    every = [p for name in ("a", "b") for p in mx.adapter_parameters(model, name).values()]
    optimizer = torch.optim.SGD(every, lr=1.0)

    def closure() -> None:
        optimizer.zero_grad()
        train(model, ids)

    if how == "zero_grad":
        optimizer.zero_grad()
    train(model, ids)
    with pytest.raises(RuntimeError, match=REFUSED[how]):
        optimizer.step(*[closure] if how == "closure" else ())
    parameter = list(mx.adapter_parameters(model, "b").values())[-1].requires_grad_(True)
    assert torch.equal(parameter, before)
    held = mx.hold_gradients(model)
    held.zero()
    train(model, ids)
    optimizer.step()
    assert not torch.equal(parameter, before), "B; A has no gradient while B is zero"


@pytest.mark.parametrize("backend", QUICK, indirect=True)
def test_gradients_of_some_inputs_are_refused_while_they_are_held() -> None:
    """Backward would add to all adapters' gradients."""
    model, ids = converted(1, **CONFIGS).train(), token_ids(2, 5)
    held = mx.hold_gradients(model)
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()

    def loss() -> torch.Tensor:
        return model(inputs_embeds=inputs, adapter_names=["a", "b"], labels=ids).loss

    with pytest.raises(RuntimeError, match=r"adapters keep their gradients, .* call Tensor.backward without"):
        torch.autograd.grad(loss(), inputs)
    with pytest.raises(RuntimeError, match="adapters keep their gradients"):
        loss().backward(inputs=[inputs])
    assert not any(buffer.any() for buffers in held.buffers.values() for buffer in buffers)
    before = loss()
    held = mx.hold_gradients(model)
    with pytest.raises(RuntimeError, match="was changed in place between forward and backward"):
        before.backward()
    loss().backward()
    assert held.buffers["a"][0].any()


@pytest.mark.parametrize("backend", QUICK, indirect=True)
def test_held_gradients_notice_a_step_before_backward() -> None:
    model, ids = converted(1, **CONFIGS).train(), token_ids(2, 5)
    mx.hold_gradients(model)
    loss = model(input_ids=ids, adapter_names=["a", "b"], labels=ids).loss
    torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
    other = torch.optim.SGD(mx.adapter_parameters(model, "b").values(), lr=1.0)
    other.step()
    with pytest.raises(RuntimeError, match="adapter 'b' was changed in place between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("backend", QUICK, indirect=True)
def test_held_gradients_come_and_go() -> None:
    """Gradients there are keeps their values; adapters that come later have none until the next call; copies
    of the model, and the model after `release`, go autograd's way.
    """
    model, ids = converted(1, **CONFIGS).train(), token_ids(2, 5)
    train(model, ids)
    before = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    held = mx.hold_gradients(model)
    assert held.buffers.keys() == {"a", "b"}
    assert all(torch.equal(dict(model.named_parameters())[key].grad, grad) for key, grad in before.items())
    norm = torch.linalg.vector_norm(torch.cat([before[key].flatten() for key in before if ".a." in key]))
    assert_same_up_to_rounding(torch.linalg.vector_norm(held.buffers["a"][0]), norm, "norm")
    mx.add_adapter(model, "c", LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(ValueError, match="no gradients are held of 'c'; call hold_gradients again"):
        held.zero(["a", "c"])
    twin = copy.deepcopy(model)
    twin.zero_grad()
    train(twin, ids)
    torch.optim.SGD(mx.adapter_parameters(twin, "a").values()).step()
    assert_same({key: g for key, g in gradients(twin).items()}, before)
    gone = weakref.ref(held.buffers["a"][0].untyped_storage())
    mx.remove_adapter(model, "a")
    gc.collect()
    assert gone() is None
    held.release()
    model.zero_grad()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad]).step()
    hooks = len(_global_optimizer_pre_hooks)
    mx.hold_gradients(model)
    assert len(_global_optimizer_pre_hooks) == hooks + 1
    del model, held, twin
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == hooks, "the model is gone, and so are they"
