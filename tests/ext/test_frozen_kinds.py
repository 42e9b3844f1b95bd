"""A second kind of frozen weight, in this file alone: 8-bit integers that are dequantised at each use."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from backends import BACKENDS, fixture_of
from cases import Case, make
from peft import LoraConfig
from tolerances import assert_as_exact
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.backends.selection import Backend
from mlora_ext.frozen import registry
from mlora_ext.frozen.base_gemm import frozen_linear
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.frozen.registry import frozen_kind, register_frozen_weight
from mlora_ext.frozen.weight import FrozenWeight
from mlora_ext.ops.functional import lora_linear_rows


class Int8Weight(FrozenWeight):
    """One scale a row. The layer's own weight goes; its buffers hold what is left of it."""

    def __init__(self, layer: nn.Module) -> None:
        weight = layer.frozen.dense()
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        layer.register_buffer("weight_int8", (weight / scale).round().to(torch.int8))
        layer.register_buffer("weight_scale", scale)
        del layer._parameters["weight"]
        self._buffers = layer._buffers
        self.products = 0

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self._buffers["weight_int8"].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._buffers["weight_scale"].dtype

    @property
    def device(self) -> torch.device:
        return self._buffers["weight_scale"].device

    @property
    def nbytes(self) -> int:
        return sum(self._buffers[key].nbytes for key in ("weight_int8", "weight_scale"))

    def dense(self) -> Tensor:
        self.products += 1
        return self._buffers["weight_int8"] * self._buffers["weight_scale"]


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered for these tests only."""
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    register_frozen_weight("int8", Int8Weight)


backend = fixture_of(BACKENDS, autouse=False)


def held(case: Case) -> tuple[Int8Weight, Tensor]:
    """The case's weight in 8 bits, and what that is in its own dtype."""
    layer = nn.Module()
    layer.weight = nn.Parameter(case.weight, requires_grad=False)
    layer.frozen = PlainWeight(layer)
    weight = Int8Weight(layer)
    return weight, weight.dense()


@pytest.mark.parametrize("p", [None, 0.3], ids=["no dropout", "dropout"])
def test_same_as_the_plain_weight_that_it_stands_for(backend: Backend, p: float | None) -> None:
    case = make([4, 7, 20], [6, 5, 9], [0, -1, 2], d_in=24, d_out=16, dtype=torch.float32, p=p)
    x, _, bias, lora_a, lora_b, *plan = case.operator_arguments()
    weight, dense = held(case)
    x, lora_a, lora_b = (
        x.detach().requires_grad_(),
        *([m.detach().requires_grad_() for m in matrices] for matrices in (lora_a, lora_b)),
    )
    leaves = [x, *lora_a, *lora_b]

    def run(frozen: FrozenWeight) -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        y = lora_linear_rows(x, frozen, bias, lora_a, lora_b, *plan)
        y.backward(case.dy)
        return [y.detach(), *(leaf.grad.clone() for leaf in leaves)]

    for found, plain in zip(run(weight), run(PlainWeight.of(dense)), strict=True):
        assert torch.allclose(found, plain, rtol=1e-5, atol=1e-5)
    assert weight.products > 1


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_the_operator_adds_to_what_is_there(rows: int) -> None:
    """`lora_add` and its backward: the same bits as the fused operator after the same product."""
    case = make([4, 7], [rows, 5], [0, 1], dtype=torch.float32, p=0.2)
    x, weight, bias, lora_a, lora_b, *plan = case.operator_arguments()
    ops, no = torch.ops.mlora_ext, None
    with torch.no_grad():
        y, s = ops.lora_linear(x, weight, bias, lora_a, lora_b, *plan, no)
        given = ops.base_linear(x, weight, bias, no)
        assert torch.equal(ops.lora_add(x, given, lora_a, lora_b, *plan), s)
        assert torch.equal(given, y)
        dx, da, db = ops.lora_linear_backward(
            case.dy, x, weight, lora_a, lora_b, s, *plan, True, True, True, no
        )
        into = ops.base_linear_dx(case.dy, weight, no)
        found = ops.lora_add_backward(case.dy, x, into, lora_a, lora_b, s, *plan, True, True)
        assert torch.equal(into, dx)
        assert all(map(torch.equal, [*found[0], *found[1]], [*da, *db]))
        only = ops.lora_add_backward(case.dy, x, None, lora_a, lora_b, s, *plan, True, False)
        assert all(map(torch.equal, only[0], da))
        assert only[1] == []


def test_what_the_operator_refuses_to_add_to() -> None:
    x, y, table = torch.randn(4, 6), torch.randn(4, 5), mx.SegmentLayout.from_lengths([4]).table("cpu")
    a, b, scaling = [torch.randn(2, 6)], [torch.randn(5, 2)], torch.ones(1)
    add, back = torch.ops.mlora_ext.lora_add, torch.ops.mlora_ext.lora_add_backward
    for wrong in (y[:3], y.double(), y.t().contiguous().t()):
        with pytest.raises(RuntimeError, match="y: expected a CPU Float matrix of 4 dense rows, got"):
            add(x, wrong, a, b, table, scaling, None, None, None)
    s = add(x, y, a, b, table, scaling, None, None, None)
    with pytest.raises(RuntimeError, match="dx: expected a CPU Float matrix of 4 dense rows, got"):
        back(y, x, torch.zeros(4, 7), a, b, s, table, scaling, None, None, None, True, True)


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 32), nn.ReLU(), nn.Linear(32, 24, bias=False))
    model = mx.convert_model(model, {"a": LoraConfig(r=3, target_modules=["0"])}, every_linear=True)
    mx.set_frozen_weights(model, kind)
    return model


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    parameters = list(mx.adapter_parameters(model, "a").values())
    with mx.route(model, mx.SegmentLayout.from_lengths([x.shape[0]]), names=["a"]):
        y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]


def dequantised(model: nn.Module) -> nn.Module:
    """A model with plain weights of the same numbers."""
    plain = model_of("plain").to(model[0].frozen.dtype)
    for ours, theirs in zip(model, plain, strict=True):
        if isinstance(ours, mx.MultiLoRALinear):
            theirs.weight.data.copy_(ours.frozen.dense())
    return plain


def test_all_layers_of_a_model_have_it() -> None:
    model, x = model_of("int8"), torch.randn(9, 40)
    assert all(isinstance(model[i].frozen, Int8Weight) for i in (0, 2))
    assert "0.weight" not in model.state_dict()
    plain = dequantised(model)
    with mx.use_backend("reference"):
        exact = run(copy.deepcopy(plain).double(), x.double())
    for found, same, oracle in zip(run(model, x), run(plain, x), exact, strict=True):
        assert_as_exact(found, same, oracle, "result")
    assert mx.set_frozen_weights(model_of("plain"), "plain") == 4 * (40 * 32 + 32 * 24)
    assert mx.set_frozen_weights(model_of("plain"), "int8") == 40 * 32 + 32 * 24 + 4 * (32 + 24)


@pytest.mark.parametrize(
    "change", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_a_copy_has_weights_of_its_own(change) -> None:
    model, x = model_of("int8"), torch.randn(9, 40)
    before = run(model, x)
    other = change(model)
    other[0].weight_scale.mul_(2)
    assert all(map(torch.equal, run(model, x), before))
    assert not torch.equal(run(other, x)[0], before[0])


def test_it_moves_and_loads_with_its_layer() -> None:
    model, other, x = model_of("int8"), model_of("int8"), torch.randn(9, 40)
    other[0].weight_scale.mul_(2)
    other.load_state_dict(model.state_dict())
    assert all(map(torch.equal, run(other, x), run(model, x)))
    half = model.to(torch.bfloat16)
    assert half[0].frozen.dtype == torch.bfloat16
    assert run(half, x.bfloat16())[0].dtype == torch.bfloat16


def test_autocast_and_compiled_graphs() -> None:
    model, x = model_of("int8"), torch.randn(9, 40)
    expected = run(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(model, x)[0]
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), expected[0], atol=0.05)
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, backend="aot_eager")
    for found, eager in zip(run(compiled, x), expected, strict=True):
        assert torch.allclose(found, eager, rtol=1e-5, atol=1e-5)


def test_rows_without_adapters() -> None:
    model, x = model_of("int8"), torch.randn(9, 40, requires_grad=True)
    layer = model[2]
    y = frozen_linear(x[:, :32], layer.frozen)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(y, x[:, :32] @ layer.frozen.dense().t(), atol=1e-5)
    assert torch.allclose(dx[:, :32], torch.ones_like(y) @ layer.frozen.dense(), atol=1e-5)


def test_merging_is_refused_and_changes_nothing() -> None:
    """The original weights are gone: the merged model would keep the rounding of all of them."""
    model, x = model_of("int8"), torch.randn(9, 40)
    before, state = run(model, x), copy.deepcopy(model.state_dict())
    message = (
        "adapter 'a': layer 0: cannot be merged into a frozen weight of kind Int8Weight; save the adapter"
    )
    with pytest.raises(ValueError, match=message):
        mx.merge_and_unload(model, "a")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(map(torch.equal, run(model, x), before))
    with pytest.raises(ValueError, match=r"0: packing needs a plain weight, got .* Int8Weight"):
        mx.pack_base(model)


def test_names() -> None:
    model = model_of("int8")
    with pytest.raises(ValueError, match="frozen weight 'plain': this name is taken; choose another one"):
        register_frozen_weight("plain", Int8Weight)
    with pytest.raises(ValueError, match=r"frozen weight: expected one of plain, packed, .*got 'int3'"):
        mx.set_frozen_weights(model, "int3")
    with pytest.raises(ValueError, match="found none"):
        mx.set_frozen_weights(nn.Linear(2, 2), "int8")
    assert frozen_kind("plain") is PlainWeight
