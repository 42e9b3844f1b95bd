"""GPTQ and AWQ bases: the library's dequantised weights in blocks, and models as Transformers loads them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from quantized_models import (
    EVERY,
    check_a_mixed_batch_with_dropout,
    check_a_peft_model,
    check_copies_casts_and_states,
    check_doras_norms,
    save_llama,
)
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn

pytest.importorskip("gptqmodel", reason="`make gptq` makes an environment with gptqmodel")

from gptqmodel.nn_modules.qlinear.torch_aten_kernel import TorchAtenLinear
from gptqmodel.nn_modules.qlinear.torch_int8 import TorchInt8Linear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

import mlora_ext as mx
from mlora_ext.frozen.base_gemm import frozen_linear
from mlora_ext.frozen.quantized import blocks, gptqmodel
from tests.packed_checkpoints import load_packed, packed, save_packed

pytestmark = pytest.mark.peers
METHODS = ("gptq", "awq")
PACKINGS = {
    **{f"gptq {bits}": ("gptq", bits, 32, False) for bits in (2, 4, 8)},
    **{f"awq {bits}": ("awq", bits, 32, False) for bits in (2, 4, 8)},
    "gptq, whole columns": ("gptq", 4, -1, False),
    "awq, whole columns": ("awq", 4, -1, False),
    "gptq, act-order": ("gptq", 4, 32, True),
}


def dequantised(theirs: Any) -> Tensor:
    """What the library makes of its layer's weight: `[O, D]` in the dtype of its scales."""
    if hasattr(theirs, "g_idx"):
        return theirs.dequantize_weight().t()
    size = theirs.group_size
    return dequantize_gemm(theirs.qweight, theirs.qzeros, theirs.scales, theirs.bits, size).t()


def converted(theirs: nn.Module, **options: Any) -> Any:
    lora = LoraConfig(r=3, target_modules=["0"], init_lora_weights=False, **options)
    return mx.convert_model(nn.Sequential(copy.deepcopy(theirs)), {"a": lora})


@pytest.mark.parametrize("kind", PACKINGS)
def test_products_are_those_of_the_library(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W has the library's bits, whole and in blocks; products are the same up to rounding."""
    method, bits, _, _ = PACKINGS[kind]
    plain = nn.Linear(128, 96)
    theirs = packed(plain, *PACKINGS[kind]).train()
    layer = converted(theirs)[0]
    expected = dequantised(theirs)
    assert expected.dtype == torch.float16
    step = (plain.weight.amax() - plain.weight.amin()) / (2**bits - 2)
    assert (expected - plain.weight).abs().amax() < 0.6 * step
    assert layer.frozen.nbytes <= 128 * 96 * (bits + 1) / 8
    x = torch.randn(9, 128, requires_grad=True)
    y = theirs(x) if method == "gptq" else x @ expected.float().t() + theirs.bias
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    for most, at_once in ((blocks.BLOCK_BYTES, gptqmodel._AT_ONCE), (40 * 128 * 4, 1)):
        monkeypatch.setattr(blocks, "BLOCK_BYTES", most)
        monkeypatch.setattr(gptqmodel, "_AT_ONCE", at_once)
        assert torch.equal(layer.frozen.dense(), expected.float())
        ours = frozen_linear(x, layer.frozen, layer.bias)
        assert_same_up_to_rounding(ours, y, "y")
        (found,) = torch.autograd.grad(ours.square().sum(), x)
        assert_same_up_to_rounding(found, dx, "dx")
    half = torch.randn(9, 128, dtype=torch.bfloat16)
    exact = half.double() @ expected.double().t() + theirs.bias.double()
    for product in (layer.frozen.matmul(half, layer.bias), theirs(half)):
        assert_same_up_to_rounding(product.double(), exact, "bf16", 1e-2)


def test_widths_that_words_and_groups_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = packed(nn.Linear(100, 50), "gptq").train()
    frozen = converted(theirs)[0].frozen
    assert torch.equal(frozen.dense(), dequantised(theirs).float())
    monkeypatch.setattr(gptqmodel, "_AT_ONCE", 1)
    assert torch.equal(frozen.dense(), dequantised(theirs).float())
    x, expected = torch.randn(3, 100), dequantised(theirs).float()
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    assert_same_up_to_rounding(frozen.matmul(x), x @ expected.t(), "y")
    assert_same_up_to_rounding(frozen.matmul_dx(x[:, :50]), x[:, :50] @ expected, "dx")


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_blocks_hold_some_rows_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, asked = converted(packed(nn.Linear(128, 96), kind))[0].frozen, []
    plain = type(frozen).rows

    def rows(self: Any, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        asked.append((begin, end))
        return plain(self, begin, end, dtype)

    monkeypatch.setattr(type(frozen), "rows", rows)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 44 * 128 * 4)
    frozen.matmul(torch.randn(3, 128))
    assert asked == [(0, 40), (40, 80), (80, 96)]


@pytest.mark.parametrize("kind", PACKINGS)
def test_copies_casts_and_states(kind: str) -> None:
    model, other = (converted(packed(nn.Linear(128, 96), *PACKINGS[kind])) for _ in range(2))
    check_copies_casts_and_states(model, other)


@pytest.mark.parametrize("method", METHODS)
def test_doras_norms_are_computed_once_for_each_step(method: str) -> None:
    one, other = (converted(packed(nn.Linear(128, 96), method), use_dora=True) for _ in range(2))
    check_doras_norms(one, other)


def of_an_own_order() -> nn.Module:
    layer = TorchInt8Linear(
        bits=8,
        group_size=32,
        sym=True,
        desc_act=False,
        in_features=64,
        out_features=64,
        register_buffers=True,
    )
    layer.post_init()
    return layer


def after_an_evaluation() -> nn.Module:
    layer = packed(nn.Linear(128, 96), "gptq", kernel=TorchAtenLinear).eval()
    layer.post_init()
    with torch.no_grad():
        layer(torch.randn(2, 128).bfloat16())
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: packed(nn.Linear(128, 96), "gptq", bits=3),
            "layer 0: its weight has 3 bits; 2, 4 and 8 are",
        ),
        (
            of_an_own_order,
            r"0: gptqmodel's kernel TorchInt8Linear holds W .* load the model with GPTQConfig\(bits=...",
        ),
        (
            after_an_evaluation,
            "layer 0: its integers are not packed as in the checkpoint, as after an evaluat",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    model = nn.Sequential(make())
    with pytest.raises(ValueError, match=message):
        mx.convert_model(model, {"a": LoraConfig(target_modules=["0"])})
    assert not isinstance(model[0], mx.MultiLoRALinear)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small Llama in both formats; its output head is plain."""
    base = save_llama(tmp_path_factory.mktemp("base"))
    return {method: save_packed(base, tmp_path_factory.mktemp(method), method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
def test_a_peft_model_is_taken_over_and_saved_for_peft(
    saved: dict[str, Path], tmp_path: Path, method: str
) -> None:
    check_a_peft_model(lambda: load_packed(saved[method], method), tmp_path)


@pytest.mark.parametrize(("method", "backend"), [("gptq", "torch"), ("awq", "torch_awq"), ("gptq", "auto")])
def test_all_kernels_have_the_same_weights(saved: dict[str, Path], method: str, backend: str) -> None:
    """The named ones, and the default of this processor; `all-linear` means all layers but the head."""
    lora = {"a": LoraConfig(r=4, target_modules="all-linear")}
    here, there = (
        mx.convert_model(load_packed(saved[method], method, backend=one), lora)
        for one in (backend, "auto_trainable")
    )
    layers = {name: m for name, m in here.named_modules() if isinstance(m, mx.MultiLoRALinear)}
    assert {name.rpartition(".")[2] for name in layers} == set(EVERY)
    for name, layer in layers.items():
        assert torch.equal(layer.frozen.dense(), there.get_submodule(name).frozen.dense())
    with pytest.raises(ValueError, match=r"cannot be merged into a frozen weight of kind (Gptq|Awq)Weight"):
        mx.merge_and_unload(here, "a")


@pytest.mark.parametrize("method", METHODS)
def test_a_mixed_batch_with_dropout_is_each_adapter_alone(saved: dict[str, Path], method: str) -> None:
    check_a_mixed_batch_with_dropout(lambda: load_packed(saved[method], method))
