"""Quantised bases of bitsandbytes and torchao: products in blocks, and models as Transformers loads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from quantized_models import (
    check_a_mixed_batch_with_dropout,
    check_a_peft_model,
    check_copies_casts_and_states,
    check_doras_norms,
    save_llama,
)
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

pytest.importorskip("bitsandbytes", reason="`make peers` makes an environment with bitsandbytes and torchao")

import bitsandbytes as bnb
import torchao.quantization as ao

import mlora_ext as mx
from mlora_ext.frozen.base_gemm import frozen_linear
from mlora_ext.frozen.quantized import blocks
from mlora_ext.frozen.quantized.torchao import stored_bytes

pytestmark = pytest.mark.peers


def four_bits(kind: str, **options: Any) -> Callable[[nn.Linear], nn.Module]:
    def make(plain: nn.Linear) -> nn.Module:
        layer = bnb.nn.Linear4bit(
            plain.in_features, plain.out_features, plain.bias is not None, quant_type=kind, **options
        )
        layer.load_state_dict(plain.state_dict())
        return layer.to(torch.get_default_device())

    return make


def eight_bits(plain: nn.Linear) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(
        plain.in_features, plain.out_features, plain.bias is not None, has_fp16_weights=False, device="cpu"
    )
    layer.load_state_dict(plain.state_dict())
    return layer.to(torch.get_default_device())


def by_torchao(make_config: Callable[[], Any]) -> Callable[[nn.Linear], nn.Module]:
    def make(plain: nn.Linear) -> nn.Module:
        layer = copy.deepcopy(plain).requires_grad_(False)
        ao.quantize_(layer, make_config())
        return layer

    return make


INT4 = ao.IntxWeightOnlyConfig(weight_dtype=getattr(torch, "int4"), granularity=ao.PerGroup(32))  # noqa: B009
LAYERS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "nf4": four_bits("nf4", compress_statistics=False),
    "nf4 twice": four_bits("nf4"),
    "fp4": four_bits("fp4"),
    "int8": eight_bits,
    "torchao int8": by_torchao(ao.Int8WeightOnlyConfig),
    "torchao int4": by_torchao(lambda: INT4),
    "torchao float8": by_torchao(ao.Float8WeightOnlyConfig),
}
BITS = {"nf4": 4.5, "nf4 twice": 4.3, "fp4": 4.3, "int8": 8.5, "torchao int8": 8.7, "torchao int4": 9.3}
"""The most bits a weight, with its scales, for rows of 64 or more; float8 as int8."""


def converted(kind: str, d_in: int = 128, d_out: int = 96, bias: bool = True) -> tuple[Any, nn.Module]:
    """A quantised layer with an adapter, and the library's own layer, in training mode."""
    theirs = LAYERS[kind](nn.Linear(d_in, d_out, bias))
    model = nn.Sequential(copy.deepcopy(theirs))
    mx.convert_model(model, {"a": LoraConfig(r=3, target_modules=["0"], init_lora_weights=False)})
    return model, theirs.train()


@pytest.mark.parametrize("kind", LAYERS)
def test_products_are_those_of_the_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and in blocks of rows that do not divide the layer; a GPU has no blocks."""
    if kind == "int8" and torch.get_default_device().type == "cuda":
        pytest.skip("bitsandbytes' own layer quantises x there")
    model, theirs = converted(kind)
    layer, x = model[0], torch.randn(9, 128, requires_grad=True)
    y = theirs(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert BITS.get(kind, 8.5) * 128 * 96 / 8 + 1028 >= layer.frozen.nbytes
    for most in (blocks.BLOCK_BYTES, 40 * 128 * 4):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", most)
        ours = frozen_linear(x, layer.frozen, layer.bias)
        assert_same_up_to_rounding(ours, y, "y")
        (found,) = torch.autograd.grad(ours.square().sum(), x)
        assert_same_up_to_rounding(found, dx, "dx")
        held = largest_dequantised(layer.frozen, x.detach(), monkeypatch)
        assert held <= (most // (128 * 4) if x.device.type == "cpu" else 96)
    half = torch.randn(9, 128, dtype=torch.bfloat16)
    exact = half.double() @ layer.frozen.dense().double().t()
    assert_same_up_to_rounding(layer.frozen.matmul(half).double(), exact, "bf16", 1e-2)


def largest_dequantised(frozen: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most rows of W that a product dequantises at once."""
    asked: list[int] = []
    plain = type(frozen).rows

    def rows(self: Any, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        asked.append(end - begin)
        return plain(self, begin, end, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(type(frozen), "rows", rows)
        frozen.matmul_dx(frozen.matmul(x))
    assert sum(asked) == 2 * frozen.shape[0]
    return max(asked)


def test_widths_that_blocks_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes' kernel computes other numbers there for a part of the rows: W is dequantised whole."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    model, theirs = converted("nf4", d_in=96)
    x = torch.randn(5, 96, requires_grad=True)
    assert_same_up_to_rounding(frozen_linear(x, model[0].frozen, model[0].bias), theirs(x), "y")


def test_products_have_the_layers_compute_dtype() -> None:
    theirs = four_bits("nf4", compute_dtype=torch.float32)(nn.Linear(64, 64))
    model = mx.convert_model(nn.Sequential(copy.deepcopy(theirs)), {"a": LoraConfig(target_modules=["0"])})
    x = torch.randn(4, 64).bfloat16().requires_grad_()
    y, expected = frozen_linear(x, model[0].frozen, model[0].bias), theirs.train()(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_casts_and_states(kind: str) -> None:
    """torchao casts the scales of its int4."""
    check_copies_casts_and_states(converted(kind)[0], converted(kind)[0], exact=kind != "torchao int4")


@pytest.mark.parametrize("kind", LAYERS)
def test_doras_norms_are_computed_once_for_each_step(kind: str) -> None:
    dora = LoraConfig(r=3, target_modules=["0"], use_dora=True, init_lora_weights=False)
    one, other = (nn.Sequential(LAYERS[kind](nn.Linear(128, 96))) for _ in range(2))
    check_doras_norms(mx.convert_model(one, {"a": dora}), mx.convert_model(other, {"a": dora}))


@pytest.mark.parametrize("kind", ["nf4", "nf4 twice"])
def test_weights_that_an_evaluation_has_reordered(kind: str) -> None:
    """On processors with AVX512-BF16 bitsandbytes changes the order, and rounds scales, when it evaluates."""
    theirs = LAYERS[kind](nn.Linear(128, 64))
    before = bnb.functional.dequantize_4bit(theirs.weight.data, theirs.weight.quant_state)
    with torch.no_grad():
        theirs.eval()(torch.randn(1, 128))
    model = mx.convert_model(nn.Sequential(theirs), {"a": LoraConfig(target_modules=["0"])})
    assert_same_up_to_rounding(model[0].frozen.dense().float(), before.float(), "W", 1e-2)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: bnb.nn.Linear4bit(64, 64), "layer 0: its 4-bit weight is not quantised yet: move"),
        (
            lambda: bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False),
            "layer 0: its 8-bit weight is not quantised yet: move",
        ),
        (lambda: bnb.nn.Linear8bitLt(64, 64), r"layer 0: its weight stays in fp16 \(has_fp16_weights=True\)"),
        (
            lambda: by_torchao(ao.Int8DynamicActivationInt8WeightConfig)(nn.Linear(64, 64)),
            "layer 0: torchao's Int8Tensor also quantises the layer's input",
        ),
    ],
)
def test_what_is_refused(layer: Callable[[], nn.Module], message: str) -> None:
    model = nn.Sequential(layer())
    with pytest.raises(ValueError, match=message):
        mx.convert_model(model, {"a": LoraConfig(target_modules=["0"])})
    assert not isinstance(model[0], mx.MultiLoRALinear)


def test_other_kinds_of_frozen_weights_are_refused() -> None:
    model, _ = converted("nf4")
    for kind in ("plain", "packed"):
        with pytest.raises(
            ValueError, match=r"0: .* needs a plain weight, got frozen weights of kind Bnb4bitW"
        ):
            mx.set_frozen_weights(model, kind)
    with pytest.raises(ValueError, match="layer 0: cannot be merged into a frozen weight of kind Bnb4bitW"):
        mx.merge_and_unload(model, "a")


BNB = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base"))


def load(folder: Path, kind: str) -> PreTrainedModel:
    config: Any = TorchAoConfig(ao.Int8WeightOnlyConfig())
    if kind in BNB:
        config = BitsAndBytesConfig(**BNB[kind])
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_a_peft_model_is_taken_over_and_saved_for_peft(base: Path, tmp_path: Path, kind: str) -> None:
    if kind == "int8" and torch.get_default_device().type == "cuda":
        pytest.skip("bitsandbytes' own layer quantises x there")
    model = check_a_peft_model(lambda: load(base, kind), tmp_path)
    with pytest.raises(ValueError, match="is not supported for quantized model"):
        model.half()


def test_a_mixed_batch_with_dropout_is_each_adapter_alone(base: Path) -> None:
    check_a_mixed_batch_with_dropout(lambda: load(base, "nf4"))


def test_the_models_bytes_are_those_of_its_weights(base: Path) -> None:
    for kind, most in (("nf4", 0.65), ("int8", 1.1), ("torchao int8", 1.1)):
        model = mx.convert_model(load(base, kind), {"a": LoraConfig(target_modules="all-linear")})
        layers = [m for m in model.modules() if isinstance(m, mx.MultiLoRALinear)]
        weights = sum(m.in_features * m.out_features for m in layers)
        kept = [t for m in layers for t in (*m._parameters.values(), *m._buffers.values())]
        held = sum(stored_bytes(t) for t in kept if t is not None and t.numel() > 1)
        assert sum(layer.frozen.nbytes for layer in layers) == pytest.approx(held, rel=0.05)
        assert held < most * weights + 1028 * len(layers)
