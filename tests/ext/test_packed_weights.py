"""`pack_base`: the same results with frozen weights in oneDNN's own layouts, whatever happens to them."""

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig
from tolerances import assert_as_exact
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mlora_ext as mx
from mlora_ext.frozen import base_gemm as gemm
from mlora_ext.frozen.base_gemm import frozen_linear
from mlora_ext.frozen.packed import PackedCache, PackedWeight, packs
from mlora_ext.frozen.plain import PlainWeight

OPS = torch.ops.mlora_ext
DTYPES = [torch.float32, torch.bfloat16]
ROWS = 96  # of products large enough for oneDNN

pytestmark = pytest.mark.skipif(
    not packs(torch.empty(1, 1)), reason="this torch has no oneDNN, and pack_base refuses"
)


def skip_unserved(dtype: torch.dtype) -> None:
    if not packs(torch.empty(1, 1, dtype=dtype)):
        pytest.skip(f"oneDNN does not serve {dtype} on this processor")


def stack(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers with an adapter each; the second has a bias."""
    model = nn.Sequential(nn.Linear(160, 144, bias=False), nn.Linear(144, 130)).to(dtype)
    config = LoraConfig(r=5, target_modules=["0", "1"], lora_dropout=0.3, init_lora_weights=False)
    return mx.convert_model(model, {"a": config}, seed=0)


def run(model: nn.Module, x: torch.Tensor, names: Sequence[str] = ("a",)) -> list[torch.Tensor]:
    """y, dx and the gradients of named adapters, with the same masks each time."""
    model.mlora_router.step = 0
    x = x.detach().requires_grad_()
    layout = mx.SegmentLayout.from_lengths([60, 36], adapters=[len(names) - 1, -1])
    with mx.route(model, layout, names=names):
        y = model(x)
    parameters = [p for p in model.parameters() if p.requires_grad and names]
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)]


def exactly(model: nn.Module, x: torch.Tensor, names: Sequence[str] = ("a",)) -> list[torch.Tensor]:
    with mx.use_backend("reference"):
        return run(copy.deepcopy(model).double(), x.double(), names)


def assert_same(found: list[torch.Tensor], plain: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    for index, tensors in enumerate(zip(found, plain, exact, strict=True)):
        assert_as_exact(*tensors, f"result {index}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "conv1d"])
@pytest.mark.parametrize("shape", [(96, 160, 144), (33, 257, 255), (1, 1100, 1000), (2100, 50, 20)], ids=str)
def test_products(shape: tuple[int, int, int], transposed: bool, dtype: torch.dtype) -> None:
    skip_unserved(dtype)
    rows, d_in, d_out = shape
    weight = torch.randn(d_in, d_out).to(dtype).t() if transposed else torch.randn(d_out, d_in).to(dtype)
    x, dy, bias = (torch.randn(*size).to(dtype) for size in ((rows, d_in), (rows, d_out), (d_out,)))
    forward, backward = PackedCache().of(weight)
    assert forward is not None
    y, dx = gemm.linear(x, weight, bias, forward), gemm.linear_dx(dy, weight, backward)
    oracle = nn.functional.linear(x.double(), weight.double(), bias.double())
    # Row-major, as packed. Of one row torch multiplies other layouts by dot products, which are more exact:
    # of 600 right results the largest error came to 5.3 times theirs, to 1.2 times that of row-major ones.
    assert_as_exact(y, torch.addmm(bias, x, weight.t().contiguous()), oracle, "y")
    assert_as_exact(dx, dy @ weight.contiguous(), dy.double() @ weight.double(), "dx")


def test_the_packed_weight_is_the_one_that_is_multiplied() -> None:
    """With another weight's packed copy, the product is another: so the tests here test what they say."""
    x, dy = torch.randn(ROWS, 160), torch.randn(ROWS, 144)
    weight, other = torch.randn(144, 160), torch.randn(144, 160)
    forward, backward = PackedCache().of(other)
    assert torch.allclose(OPS.base_linear(x, weight, None, forward), x @ other.t(), atol=1e-3)
    assert torch.allclose(OPS.base_linear_dx(dy, weight, backward), dy @ other, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model(dtype: torch.dtype) -> None:
    skip_unserved(dtype)
    model = stack(dtype)
    x = torch.randn(ROWS, 160).to(dtype)
    keys = list(model.state_dict())
    plain, exact = run(model, x), exactly(model, x)
    added = mx.pack_base(model)
    assert added >= 2 * sum(layer.weight.nbytes for layer in model)
    assert_same(run(model, x), plain, exact)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("names", [["a"], []], ids=["adapter", "no names"])
def test_layers_multiply_by_what_is_packed(names: list[str]) -> None:
    """With packed copies of another model's weights, results are that model's, forward and backward."""
    model, other = stack(), stack()
    for ours, theirs in zip(model, other, strict=True):
        theirs.weight.copy_(torch.randn_like(theirs.weight))
        if theirs.bias is not None:
            theirs.bias.copy_(ours.bias)
    x = torch.randn(ROWS, 160)
    exact = exactly(other, x, names)
    plain = run(other, x, names)
    for packed in (model, other):
        mx.pack_base(packed)
    for ours, theirs in zip(model, other, strict=True):
        key, source, _ = ours.frozen.cache._state
        ours.frozen.cache._state = key, source, theirs.frozen.cache._state[2]
    assert_same(run(model, x, names), plain, exact)


def test_layers_that_are_converted_later_pack_at_their_first_use() -> None:
    model = nn.Sequential(nn.Linear(160, 144), nn.Linear(144, 130))
    model = mx.convert_model(model, {"a": LoraConfig(r=4, target_modules=["0"])})
    mx.pack_base(model)
    mx.add_adapter(model, "b", LoraConfig(r=4, target_modules=["1"]))
    assert model[1].frozen.cache.nbytes == 0
    with mx.route(model, mx.SegmentLayout.from_lengths([ROWS]), names=["b"]):
        model(torch.randn(ROWS, 160))
    assert model[1].frozen.cache.nbytes >= 2 * model[1].weight.nbytes


@pytest.mark.parametrize("way", [mx.pack_base, lambda model: mx.set_frozen_weights(model, "packed")])
def test_tied_weights_are_packed_once(way: Callable[[nn.Module], int]) -> None:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    model[1].weight = model[0].weight
    model = mx.convert_model(model, {"a": LoraConfig(r=4, target_modules=["0", "1"])})
    plain = model[0].weight.nbytes
    assert way(model) == (2 if way is mx.pack_base else 3) * plain
    assert model[0].frozen.cache.nbytes == 2 * plain
    assert model[0].frozen.cache is model[1].frozen.cache
    assert mx.set_frozen_weights(model, "plain") == plain


@pytest.mark.parametrize("library", ["aten", "onednn", "packed"])
def test_a_bias_with_gaps(library: str) -> None:
    """oneDNN takes any bias for dense."""
    x, weight, bias = torch.randn(ROWS, 160), torch.randn(144, 160), torch.randn(288)[::2]
    before = gemm.base_gemm_of(torch.float32)
    pair = PackedCache().of(weight) if library == "packed" else (None, None)
    try:
        gemm.set_base_gemm({"float32": "aten" if library == "packed" else library})
        y = gemm.linear(x, weight, bias, pair[0])
    finally:
        gemm.set_base_gemm(before)
    oracle = nn.functional.linear(x.double(), weight.double(), bias.double())
    assert_as_exact(y, nn.functional.linear(x, weight, bias), oracle, "y")


def scaled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[0].weight.mul_(-0.5)
    return model


def reloaded(model: nn.Module) -> nn.Module:
    model.load_state_dict({key: 0.5 * value for key, value in model.state_dict().items()})
    return model


def assigned(model: nn.Module) -> nn.Module:
    values = {key: 0.5 * value for key, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    return model


def rebound(model: nn.Module) -> nn.Module:
    model[1].weight.data = torch.randn(130, 144)
    return model


CHANGES: list[Callable[[nn.Module], nn.Module]] = [
    scaled,
    reloaded,
    assigned,
    rebound,
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    lambda model: model.to(torch.bfloat16),
    lambda model: model.to(torch.float16),
    lambda model: model.bfloat16().float(),
]


CHANGED = ["scaled", "reloaded", "assigned", "rebound", "deepcopy", "pickle", "bf16", "fp16", "bf16 and back"]


@pytest.mark.parametrize("change", CHANGES, ids=CHANGED)
def test_weights_that_change(change: Callable[[nn.Module], nn.Module]) -> None:
    """Packed weights follow; what oneDNN does not serve is multiplied as it would be without."""
    packed = stack()
    mx.pack_base(packed)
    run(packed, torch.randn(ROWS, 160))
    packed = change(packed)
    plain = copy.deepcopy(packed)
    for layer in plain:
        layer.frozen = PlainWeight(layer)
    dtype = packed[0].weight.dtype
    x = torch.randn(ROWS, 160).to(dtype)
    assert_same(run(packed, x), run(plain, x), exactly(plain, x))


def test_an_address_that_is_used_again() -> None:
    """Rebinding twice may bring the address and the version of the weight that was packed."""
    weight = nn.Parameter(torch.randn(144, 160), requires_grad=False)
    packed, x = PackedCache(), torch.randn(ROWS, 160)
    packed.of(weight)
    for _ in range(20):
        weight.data = weight.data * 0.5
        weight.data = weight.data * 0.5
        y = gemm.linear(x, weight, None, packed.of(weight)[0])
        assert_as_exact(y, x @ weight.t(), x.double() @ weight.t().double(), "y")


def test_pack_base_again_packs_what_data_changed() -> None:
    model, x = stack(), torch.randn(ROWS, 160)
    mx.pack_base(model)
    model[0].weight.data.mul_(-0.5)
    mx.pack_base(model)
    plain = copy.deepcopy(model)
    for layer in plain:
        layer.frozen = PlainWeight(layer)
    assert_same(run(model, x), run(plain, x), exactly(plain, x))


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        weight = torch.randn(144, 160)
    assert PackedCache().of(weight) == (None, None)
    model = stack()
    with torch.inference_mode():
        model[1].weight = nn.Parameter(torch.randn(130, 144), requires_grad=False)
    with pytest.raises(ValueError, match="1: its weight was made in inference mode"):
        mx.pack_base(model)


def test_autocast_and_compiled_graphs_go_without() -> None:
    model, x = stack(), torch.randn(ROWS, 160)

    def autocast_and_compiled() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            results = run(model, x)
        compiled = copy.deepcopy(model)
        compiled.compile(fullgraph=True, backend="aot_eager")
        return results + run(compiled, x)

    plain = autocast_and_compiled()
    for layer in model:
        layer.frozen = PackedWeight(layer)
    for ours, theirs in zip(autocast_and_compiled(), plain, strict=True):
        assert torch.equal(ours, theirs)
    with mx.use_backend("reference"):
        run(model, x)
    assert [layer.frozen.cache.nbytes for layer in model] == [0, 0], "packed for nothing"
    run(model, x)
    assert all(layer.frozen.cache.nbytes > 0 for layer in model)


def test_fake_tensors_and_traces_go_without() -> None:
    weight = torch.randn(144, 160)
    packed = PackedWeight.of(weight)
    with FakeTensorMode():
        assert packed.fused(torch.empty(ROWS, 160))[1:] == (None, None)
        assert packed.cache.of(torch.empty(144, 160)) == (None, None)
    traced = torch.jit.trace(lambda x: frozen_linear(x, packed), torch.randn(ROWS, 160))
    x = torch.randn(ROWS, 160)
    assert torch.equal(traced(x), frozen_linear(x, PlainWeight.of(weight)))


def test_rows_without_any_adapter() -> None:
    model, x = stack(), torch.randn(ROWS, 160)
    exact = copy.deepcopy(model).double()
    mx.pack_base(model)
    layout = mx.SegmentLayout.from_lengths([ROWS], adapters=[-1])
    with mx.route(model, layout, names=[]):
        x.requires_grad_()
        y = model(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    w0, w1, bias = exact[0].weight, exact[1].weight, exact[1].bias
    oracle = x.detach().double() @ w0.t() @ w1.t() + bias
    plain = nn.functional.linear(x.detach() @ model[0].weight.t(), model[1].weight, model[1].bias)
    assert_as_exact(y.detach(), plain, oracle, "y")
    ones = torch.ones_like(y)
    assert_as_exact(dx, ones @ model[1].weight @ model[0].weight, ones.double() @ w1 @ w0, "dx")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(3, 4), "expected layers converted by mlora_ext.convert_model, found none"),
        (
            lambda: stack(torch.float16),
            r"0: oneDNN does not serve float16 weights of shape \[144, 160\] on cpu",
        ),
        (
            lambda: stack().to("meta"),
            r"0: oneDNN does not serve float32 weights of shape \[144, 160\] on meta",
        ),
    ],
    ids=["not converted", "fp16", "meta"],
)
@pytest.mark.parametrize("way", [mx.pack_base, lambda model: mx.set_frozen_weights(model, "packed")])
def test_refusals(way: Callable[[nn.Module], int], model: Callable[[], nn.Module], message: str) -> None:
    refused = model()
    with pytest.raises(ValueError, match=message):
        way(refused)
    assert not any(isinstance(getattr(m, "frozen", None), PackedWeight) for m in refused.modules())


def test_a_packed_weight_of_another_shape_is_refused() -> None:
    forward, _ = PackedCache().of(torch.randn(8, 9))
    with pytest.raises(
        RuntimeError, match=r"packed: expected Float of shape \[8, 7\], got Float of shape \[8, 9\]"
    ):
        OPS.base_linear(torch.randn(4, 7), torch.randn(8, 7), None, forward)
