"""Wrong arguments are refused by name, errors have fields, imports are light, segments have a table."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from cases import make
from mlora.errors import NamedRunError, reason_of
from peft import LoraConfig
from torch import nn

import mlora_ext as mx
from mlora_ext import SegmentLayout, library
from mlora_ext.errors import AdapterError, NamedError


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
    monkeypatch.setattr(library, "LOADED", False)
    with pytest.raises(RuntimeError, match=r"pip install --no-build-isolation .*use_backend\('reference'\)"):
        mx.multi_lora_linear(**arguments())


def test_defaults() -> None:
    layout = SegmentLayout.from_lengths([5, 0, 3])
    assert layout.adapters == (0, 1, 2)
    assert layout.row0 == (0, 0, 0)
    assert (layout.total_rows, layout.num_adapters) == (8, 3)


def test_row0_counts_each_adapters_rows() -> None:
    layout = SegmentLayout.from_lengths([5, 2, 3, 4, 1], adapters=[1, -1, 1, 0, 1])
    assert layout.row0 == (0, 0, 5, 0, 8)


def test_table() -> None:
    layout = SegmentLayout.from_lengths([5, 0, 3], adapters=[1, 0, -1], row0=[7, 8, 0])
    table = layout.table()
    assert table.dtype == torch.int64
    assert table[:3].tolist() == [[0, 5, 1, 7], [5, 5, 0, 8], [5, 8, -1, 0]]
    assert (table[3:] == torch.tensor([0, 0, -1, 0])).all()
    assert layout.table() is table


@pytest.mark.parametrize(("segments", "rows"), [(0, 64), (1, 64), (64, 64), (65, 128), (300, 512)])
def test_table_sizes_repeat(segments: int, rows: int) -> None:
    assert SegmentLayout.from_lengths([1] * segments).table().shape == (rows, 4)


def test_remap_keeps_rows() -> None:
    layout = SegmentLayout.from_lengths([5, 2, 3], adapters=[1, -1, 0], row0=[4, 0, 9]).remap([-1, 0])
    assert layout.adapters == (0, -1, -1)
    assert layout.row0 == (4, 0, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [1, -2]}, r"lengths\[1\]: expected an integer >= 0, got -2"),
        ({"lengths": [1.5]}, r"lengths: expected integers, got \[1\.5\]"),
        ({"lengths": [1, 2], "adapters": [0]}, r"adapters: expected one value per segment \(2\), got 1"),
        ({"lengths": [1], "adapters": [-2]}, r"adapters\[0\]: expected an integer >= -1, got -2"),
        ({"lengths": [1], "row0": [0, 1]}, r"row0: expected one value per segment \(1\), got 2"),
    ],
)
def test_refused_segments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SegmentLayout.from_lengths(**arguments)


@pytest.mark.parametrize(
    "error",
    [AdapterError("a", "is wrong"), NamedError("adapter 'a'", "is wrong"), NamedRunError("a", "is wrong")],
)
def test_an_error_says_what_is_at_fault_and_why(error):
    assert str(error) == f"{error.what}: is wrong" == str(pickle.loads(pickle.dumps(error)))
    assert reason_of(error, error.what) == "is wrong"
    assert reason_of(error, "b") == str(error)
    assert reason_of(ValueError("plain"), "a") == "plain"


def test_a_refused_adapter_is_named():
    with pytest.raises(AdapterError) as error:
        mx.convert_model(nn.Sequential(nn.Linear(4, 4)), {"a": LoraConfig(target_modules=["q"])})
    assert error.value.name == "a"
    assert error.value.message.startswith("target_modules=['q'] match nothing")


def test_it_adds_only_itself_to_torch() -> None:
    code = (
        "import sys, torch\nbefore = set(sys.modules)\nimport mlora_ext\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before}))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['mlora_ext']", "False"]


def test_fake_tensors_are_served_from_the_first_import_on() -> None:
    """Other tests import what tells torch of fake results; a process of its own has `mlora_ext` only."""
    code = """
import torch, mlora_ext as mx
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    x, w, a, b = torch.empty(3, 4), torch.empty(5, 4), torch.empty(2, 4), torch.empty(5, 2)
    layout = mx.SegmentLayout.from_lengths([3])
    y = mx.multi_lora_linear(x.requires_grad_(), w, None, [a], [b.t().contiguous().t()], [1.0], layout)
    y.sum().backward()
    assert y.shape == (3, 5) and x.grad.shape == (3, 4)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
