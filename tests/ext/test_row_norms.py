"""The norms that DoRA divides by: exact over ranks and large B, and computed once for each optimizer step."""

import copy
import dataclasses
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from models import llama, token_ids
from peft import LoraConfig
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.frozen.plain import PlainWeight
from mlora_ext.frozen.row_norms import row_norms, row_squares
from mlora_ext.frozen.weight import FrozenWeight


def dense(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    return (weight.double() + scaling * b.double() @ a.double()).norm(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e3])
def test_as_exact_as_the_dense_norm(dtype: torch.dtype, size: float) -> None:
    weight = torch.randn(70, 300).to(dtype)
    adapters = [
        (torch.rand(rank, 300) - 0.5, size * torch.randn(70, rank), 2.0 / rank) for rank in (1, 7, 64, 200)
    ]
    for norms, adapter in zip(row_norms(PlainWeight.of(weight), adapters), adapters, strict=True):
        assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(norms.double(), dense(weight, *adapter), rtol=1e-6, atol=0)


def test_rows_that_cancel_are_computed_densely() -> None:
    """W + B A is a thousandth of W in some rows, and 0 in one."""
    a, weight = torch.randn(8, 64), torch.randn(40, 64)
    b = torch.randn(40, 8)
    weight[:9] = -(b[:9].double() @ a.double()).float() * (1 + 1e-3 * torch.rand(9, 1))
    weight[9], b[9] = 0, 0
    (norms,) = row_norms(PlainWeight.of(weight), [(a, b, 1.0)])
    torch.testing.assert_close(norms.double(), dense(weight, a, b, 1.0), rtol=1e-6, atol=0)
    squares = row_squares(PlainWeight.of(weight))
    assert squares.sqrt()[:9].min() > 100 * norms[:9].max()


def test_products_that_pytorch_may_shorten() -> None:
    weight, a, b = torch.randn(50, 256), torch.randn(4, 256), torch.randn(50, 4)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        (norms,) = row_norms(PlainWeight.of(weight), [(a, b, 1.0)])
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(norms.double(), dense(weight, a, b, 1.0), rtol=1e-6, atol=0)


class OnlyTheInterface(FrozenWeight):
    """int8 with a scale per row, with no more than a frozen weight must have."""

    def __init__(self, layer: nn.Module) -> None:
        weight = layer.frozen.dense()
        scale = weight.abs().amax(1, keepdim=True) / 127
        layer.register_buffer("int8", (weight / scale).round().to(torch.int8))
        layer.register_buffer("row_scale", scale)
        layer.weight = None
        self._buffers = layer._buffers

    def dense(self) -> Tensor:
        return self._buffers["int8"] * self._buffers["row_scale"]

    shape = property(lambda self: tuple(self._buffers["int8"].shape))
    dtype = property(lambda self: self._buffers["row_scale"].dtype)
    device = property(lambda self: self._buffers["row_scale"].device)
    nbytes = property(lambda self: self._buffers["int8"].nbytes + self._buffers["row_scale"].nbytes)


def test_of_any_frozen_weight_and_after_it_changed() -> None:
    net = nn.Sequential(nn.Linear(12, 20))
    model = mx.convert_model(
        net, {"a": LoraConfig(r=2, use_dora=True, target_modules=["0"], init_lora_weights=False)}
    )
    mx.set_frozen_weights(model, OnlyTheInterface)
    layer, x = model[0], torch.randn(3, 12)

    def expected() -> Tensor:
        own = layer.parameters_of("a")
        whole = layer.frozen.dense() + layer.specs["a"].scaling * own["lora_B"] @ own["lora_A"]
        scale = own["lora_magnitude_vector"] / whole.norm(dim=1)
        return nn.functional.linear(x, whole * scale.unsqueeze(1), layer.bias)

    torch.testing.assert_close(model(x), expected())
    layer.row_scale.mul_(1.5)
    torch.testing.assert_close(model(x), expected())


def dora_model() -> nn.Module:
    fields = {"r": 4, "use_dora": True, "target_modules": ["q_proj"], "init_lora_weights": False}
    plain = {"r": 4, "target_modules": ["q_proj"]}
    return mx.convert_model(
        llama(), {"a": LoraConfig(**fields), "b": LoraConfig(**fields), "c": LoraConfig(**plain)}
    )


def computed(model: nn.Module) -> int:
    return sum(m.norms.computed for m in model.modules() if isinstance(m, mx.MultiLoRALinear))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "optimizer",
    ["torch.optim:AdamW", pytest.param("bitsandbytes.optim:AdamW8bit", marks=pytest.mark.peers)],
)
def test_once_for_each_optimizer_step(optimizer: str, micro_batches: int) -> None:
    """Whatever the number of micro-batches, with checkpointing, and where an optimizer counts no version."""
    model, ids = dora_model().train(), token_ids(3, 5)
    model.gradient_checkpointing_enable()
    kind: Any = resolve_name(optimizer)
    adams = {n: kind(mx.adapter_parameters(model, n).values(), lr=1e-2) for n in "abc"}
    for step in range(3):
        for _ in range(micro_batches):
            model(input_ids=ids, labels=ids, adapter_names=["a", "b", "c"]).loss.backward()
        with torch.no_grad():
            model(input_ids=ids, adapter_names=["c", "b", "b"])
        assert computed(model) == 2 * 2 * (step + 1)  # two layers, two adapters
        for adam in adams.values():
            adam.step()
            adam.zero_grad()
    model(input_ids=ids, adapter_names=["a"] * 3)
    assert computed(model) == 2 * 7


def test_never_of_other_numbers() -> None:
    """After whatever changes A, B, the scaling or W, the logits are those of a model that keeps nothing."""
    model, ids = dora_model().eval(), token_ids(1, 5)
    other = {k: torch.randn_like(v) for k, v in model.state_dict().items() if ".lora_" in k}
    layer = model.model.layers[0].self_attn.q_proj

    def lora_a() -> nn.Parameter:
        return layer.parameters_of("a")["lora_A"]

    def logits(of: nn.Module) -> Tensor:
        with torch.no_grad():
            return of(input_ids=ids, adapter_names=["a"]).logits

    def same_data() -> None:
        lora_a().data = torch.randn_like(lora_a())

    def moved_and_back() -> None:
        lora_a().data = torch.randn_like(lora_a())
        model.to(torch.float32)

    def rescaled() -> None:
        for module in model.modules():
            if isinstance(module, mx.MultiLoRALinear) and "a" in module.specs:
                module.specs["a"] = dataclasses.replace(module.specs["a"], scaling=3.0)

    def in_inference_mode() -> None:
        with torch.inference_mode():
            lora_a().mul_(0.5)

    def loaded() -> None:
        model.load_state_dict(other, strict=False)

    def assigned() -> None:
        model.load_state_dict({k: torch.randn_like(v) for k, v in other.items()}, strict=False, assign=True)

    def base_changed() -> None:
        with torch.no_grad():
            layer.weight.mul_(1.1)

    def told() -> None:
        lora_a().data.mul_(0.5)
        torch.autograd.graph.increment_version(lora_a())

    logits(model)
    for change in (
        same_data,
        same_data,
        moved_and_back,
        rescaled,
        in_inference_mode,
        loaded,
        assigned,
        base_changed,
        told,
    ):
        before = logits(model)
        change()
        after = logits(model)
        assert not torch.equal(before, after), change.__name__
        fresh = copy.deepcopy(model)  # a copy keeps nothing
        assert torch.equal(logits(fresh), after), change.__name__
    mx.remove_adapter(model, "a")
    mx.add_adapter(model, "a", LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]))
    with torch.no_grad():
        base = model(input_ids=ids, adapter_names=["__base__"]).logits
    torch.testing.assert_close(logits(model), base)  # the magnitudes begin as the norms
