"""multi_lora_linear refuses wrong arguments by name; backends are chosen, never guessed."""

from collections.abc import Callable

import pytest
import torch
from cases import make

import mlora_ext as mx
from mlora_ext.ops import library as _ops


def arguments(**changes: object) -> dict:
    case = make([4, 7], [6, 5], [0, 1])
    names = ("x", "weight", "bias", "lora_a", "lora_b", "scaling", "layout", "dropout")
    return {**dict(zip(names, case.arguments(), strict=True)), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.randn(24, 41)}, r"weight: expected \[d_out, 40\] .*, got \[24, 41\]"),
        ({"weight": torch.randn(24, 40).half()}, r"weight: expected torch.float32 .*, got torch.float16"),
        ({"weight": torch.randn(24, 40, device="meta")}, r"weight: expected device cpu .*, got meta"),
        ({"weight": torch.randn(24, 40, requires_grad=True)}, r"weight: expected a frozen tensor"),
        ({"bias": torch.randn(25)}, r"bias: expected \[24\], got \[25\]"),
        ({"lora_a": [torch.randn(4, 40)]}, r"lora_b: expected one per adapter \(1\), got 2"),
        ({"lora_a": [torch.randn(4, 40), torch.randn(0, 40)]}, r"lora_a\[1\]: expected \[rank >= 1, 40\]"),
        ({"lora_b": [torch.randn(24, 4), torch.randn(24, 6)]}, r"lora_b\[1\]: expected \[24, 7\], got"),
        ({"lora_b": [torch.randn(24, 4), torch.ones(24, 7).int()]}, r"lora_b\[1\]: expected floating point"),
        ({"scaling": [1.0]}, r"scaling: expected one value per adapter \(2\), got shape \[1\]"),
        ({"scaling": 2.0}, r"scaling: expected a list of one value per adapter \(2\), got 2.0"),
        ({"layout": mx.SegmentLayout.from_lengths([6, 4])}, r"layout: expected 11 rows .*, got 10"),
        ({"layout": mx.SegmentLayout.from_lengths([6, 5], [0, 2])}, r"layout: expected adapters below 2"),
        ({"dropout": mx.LoRADropout([0.1], [1])}, r"dropout: expected p for 2 adapters, got 1"),
    ],
)  # fmt: skip
def test_refusals(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mx.multi_lora_linear(**arguments(**changes))


@pytest.mark.parametrize(
    ("make_dropout", "message"),
    [
        (lambda: mx.LoRADropout([0.1, 1.0], [1, 2]), r"dropout\.p\[1\]: expected .* 0 <= p < 1, got 1\.0"),
        (lambda: mx.LoRADropout([-0.1], [1]), r"dropout\.p\[0\]"),
        (lambda: mx.LoRADropout([0.1], [1, 2]), r"dropout\.seeds: expected one per adapter \(1\), got 2"),
        (lambda: mx.LoRADropout([0.1], [1], step=[1, 2]), r"dropout\.step: expected one per adapter"),
    ],
)
def test_dropout_refusals(make_dropout: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_dropout()


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, -1])
def test_seeds_of_64_bits(seed: int) -> None:
    _, rng, _ = mx.LoRADropout([0.1], [seed]).tensors("cpu")
    assert int(rng[0, 0]) % 2**64 == seed % 2**64


def test_use_backend_nests_and_ends() -> None:
    case = make([4], [6], [0]).to(torch.float64)
    with mx.use_backend("cpu"):
        with mx.use_backend("reference"):
            mx.multi_lora_linear(*case.arguments())
        with pytest.raises(ValueError, match="float64"):
            mx.multi_lora_linear(*case.arguments())


def test_missing_library_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "LOADED", False)
    with pytest.raises(RuntimeError, match=r"pip install --no-build-isolation .*use_backend\('reference'\)"):
        mx.multi_lora_linear(**arguments())
