"""init_lora_weights of folders, and the leading singular vectors that initialisations take."""

from __future__ import annotations

import copy
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from models import llama, token_ids
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from scipy.sparse import linalg
from tolerances import assert_same_up_to_rounding
from torch import Tensor, nn

import mlora_ext as mx
from mlora_ext.start.from_weights import leading_svd


def saved(base: nn.Module, folder: Path, how: Any, **fields: Any) -> PeftModel:
    """A PEFT model over a copy of the base, trained a little, and its folder."""
    config = LoraConfig(
        r=4, lora_alpha=9, target_modules=["q_proj", "up_proj"], init_lora_weights=how, **fields
    )
    peft = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if "lora_" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    peft.save_pretrained(folder)
    return peft.eval()


@pytest.mark.parametrize(
    ("how", "fields"),
    [("orthogonal", {}), ("eva", {}), ("gaussian", {}), (False, {}), (True, {"corda_config": CordaConfig()})],
)
@pytest.mark.filterwarnings("ignore")
def test_folders_with_other_start_values(how: Any, fields: dict, tmp_path: Path) -> None:
    base, ids = llama().eval(), token_ids(2, 5)
    peft = saved(base, tmp_path / "a", how, **fields)
    again = copy.deepcopy(base)
    mx.load_adapter(again, "x", tmp_path / "a")
    taken = mx.from_peft(copy.deepcopy(peft))
    with torch.no_grad():
        expected = peft(input_ids=ids).logits
        assert_same_up_to_rounding(again(input_ids=ids).logits, expected, "logits of what was loaded")
        assert_same_up_to_rounding(taken(input_ids=ids).logits, expected, "logits of what was taken over")
        mx.save_adapter(again, "x", tmp_path / "b")
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "b").eval()
        assert_same_up_to_rounding(theirs(input_ids=ids).logits, expected, "logits of PEFT")
    mx.load_adapter(again, "y", tmp_path / "b")
    mx.load_adapter(again, "x", tmp_path / "a")


@pytest.mark.parametrize("how", ["pissa", "pissa_niter_4", "olora", "lora_ga"])
@pytest.mark.filterwarnings("ignore")
def test_folders_over_another_base(how: str, tmp_path: Path) -> None:
    base = llama()
    settings = {"lora_ga_config": LoraGAConfig()} if how == "lora_ga" else {}
    peft = saved(base, tmp_path, how, **settings)
    for refused in (lambda: mx.load_adapter(base, "a", tmp_path), lambda: mx.from_peft(peft)):
        message = f"init_lora_weights='{how}' is not supported for an adapter of PEFT: .* make a plain LoRA"
        with pytest.raises(ValueError, match=message):
            refused()
    assert all(parameter.requires_grad for parameter in base.parameters())


@pytest.mark.parametrize(
    ("how", "fields", "message"),
    [
        ("mica", {}, "with it PEFT never trains lora_B"),
        ("pissa_niter_x", {}, "expected True, False, 'gaussian', 'orthogonal', 'eva', 'pissa'"),
    ],
)
def test_refused_initialisations(how: str, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"init_lora_weights='{how}' is not supported: {message}"):
        mx.convert_model(llama(), {"a": LoraConfig(init_lora_weights=how, **fields)})


@pytest.mark.filterwarnings("ignore")
def test_a_pissa_folder_made_plain(tmp_path: Path) -> None:
    """The way out that the refusal names."""
    base, ids = llama().eval(), token_ids(2, 5)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    peft = get_peft_model(copy.deepcopy(base), config)
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if "lora_" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        expected = peft.eval()(input_ids=ids).logits
        peft.save_pretrained(
            tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start")
        )
        mx.load_adapter(base, "a", tmp_path / "plain")
        assert_same_up_to_rounding(base(input_ids=ids).logits, expected, "logits", 1e-4)


def test_a_name_as_a_pattern_is_told_from_a_list() -> None:
    with pytest.raises(
        ValueError, match=r"a string is a pattern for whole names; did you mean \['q_proj'\]\?"
    ):
        mx.convert_model(llama(), {"a": LoraConfig(target_modules="q_proj")})
    mx.convert_model(llama(), {"a": LoraConfig(target_modules=["q_proj"])})


def rounding(rows: int, columns: int) -> Tensor:
    """What a quantisation loses: singular values that lie close together."""
    weight = torch.randn(rows, columns)
    return weight - (4 * weight).round() / 4


def product(found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    u, s, vh = found
    return (u * s) @ vh


MATRICES: dict[str, Any] = {
    "wide": lambda: rounding(520, 640),
    "tall": lambda: rounding(640, 520),
    "each value twice": lambda: torch.block_diag(*[rounding(300, 280)] * 2),
}


@pytest.mark.parametrize("kind", MATRICES)
def test_large_matrices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as fp32 holds numbers, and the same bits again."""
    matrix = MATRICES[kind]()
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    monkeypatch.setattr(torch.linalg, "svd", None)
    count = 16
    found = leading_svd(matrix, count)
    assert [one.dtype for one in found] == [torch.float32] * 3
    assert_same_up_to_rounding(found[1].double(), s[:count], "singular values", 1e-6)
    assert_same_up_to_rounding(product(found).double(), product((u[:, :count], s[:count], vh[:count])), kind)
    identity = torch.eye(count)
    for vectors in (found[0].t(), found[2]):
        assert_same_up_to_rounding(vectors @ vectors.t(), identity, "orthonormal")
    for one, again in zip(found, leading_svd(matrix, count), strict=True):
        assert torch.equal(one, again)


def test_the_iteration_copies_no_matrix() -> None:
    """NumPy's arrays hold vectors; the matrix itself is there in fp64 once, as a tensor."""
    matrix = rounding(1024, 1024)
    leading_svd(matrix, 2)
    tracemalloc.start()
    try:
        leading_svd(matrix, 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * 8 * matrix.numel()


def test_a_matrix_of_a_lower_rank() -> None:
    matrix = torch.randn(600, 5) @ torch.randn(5, 520)
    found = leading_svd(matrix, 16)
    assert_same_up_to_rounding(product(found), matrix, "product")
    assert found[1][5:].amax() < 1e-5 * found[1][0]


@pytest.mark.parametrize(("rows", "columns", "count"), [(40, 64, 3), (64, 40, 50), (520, 640, 17)])
def test_others_are_decomposed_whole(rows: int, columns: int, count: int) -> None:
    """Small ones, and those of which many vectors are wanted; there are no more than the matrix has."""
    matrix = rounding(rows, columns)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    expected = u[:, :count], s[:count], vh[:count]
    for one, other in zip(leading_svd(matrix, count), expected, strict=True):
        assert torch.equal(one, other)


def test_an_iteration_that_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise linalg.ArpackNoConvergence("no convergence", [], [])

    monkeypatch.setattr(linalg, "svds", never)
    matrix = rounding(512, 512)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    for one, other in zip(leading_svd(matrix, 2), (u[:, :2], s[:2], vh[:2]), strict=True):
        assert torch.equal(one, other)
