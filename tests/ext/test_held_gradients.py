"""Gradients that adapters keep: backward adds to them itself, and the numbers are autograd's."""

import copy
import gc
import weakref

import pytest
import torch
from backends import BACKENDS, QUICK, serving
from cases import Case, assert_right, make
from models import assert_same, converted, gradients, token_ids
from peft import LoraConfig
from tolerances import assert_same_up_to_rounding
from torch import nn

import mlora_ext as mx
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.frozen.weight import FrozenWeight
from mlora_ext.nn.bank import AdapterBank
from mlora_ext.nn.linear import MultiLoRALinear
from mlora_ext.ops.functional import lora_linear_held
from mlora_ext.ops.held import HeldAdapters, Updates, hold


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    with serving(request.param, monkeypatch) as name:
        yield name


def with_gradients(case: Case) -> Case:
    for leaf in leaves(case):
        leaf.grad = torch.zeros_like(leaf)
    return case


def leaves(case: Case) -> list[torch.Tensor]:
    return [*case.lora_a, *case.lora_b]


def held_of(case: Case, written: set[str] | None = None) -> HeldAdapters | None:
    names = tuple(f"a{i}" for i in range(len(case.lora_a)))
    return hold(names, [case.lora_a], [case.lora_b], [set() if written is None else written])


def forward(
    case: Case,
    held: HeldAdapters | None,
    updates: Updates | None = None,
    frozen: type[FrozenWeight] = PlainWeight,
) -> torch.Tensor:
    assert held is not None
    x, weight, bias, _, _, *plan = case.operator_arguments()
    found = lora_linear_held(x, [frozen.of(weight)], [bias], held, tuple(plan), updates or Updates())
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
    case, updates, written = with_gradients(make([4, 7], [6, 5], [0, 1])), Updates(), set()
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
    (dx,) = torch.autograd.grad(forward(case, held), case.x, case.dy, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        dx.sum().backward()
    x, weight, bias, _, _, *plan = case.operator_arguments()
    served: list[bool] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        found = lora_linear_held(x, [PlainWeight.of(weight)], [bias], held, tuple(plan), Updates())
        served.append(found is not None)
        return x.sum()

    torch.func.grad(loss)(x.detach())
    assert served == [False], "autograd's way, whose message says what is missing"
